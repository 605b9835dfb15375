package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode/utf8"

	"golang.org/x/term"
)

// A lineReader returns the messages of a conversation.
type lineReader interface {
	// next returns the next message, or io.EOF at the end of the conversation.
	next() (string, error)
}

// errNoLine reports that the user pressed Ctrl-C instead of finishing a line.
var errNoLine = errors.New("the line was interrupted")

// newLineReader returns a reader for messages, and whether they come from a terminal.
func newLineReader(in io.Reader, out io.Writer) (_ lineReader, interactive bool) {
	f, ok := in.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		s := bufio.NewScanner(in)
		s.Buffer(nil, maxLine)
		return lineScanner{s}, false
	}

	fd := int(f.Fd())
	e := newLineEditor(f, out)
	e.enter = func() (leave func() error, err error) {
		if width, height, err := term.GetSize(fd); err == nil && width > 0 {
			if err := e.terminal.SetSize(width, height); err != nil {
				return nil, err
			}
		}
		state, err := term.MakeRaw(fd)
		if err != nil {
			return nil, err
		}
		e.terminal.SetBracketedPasteMode(true)
		return func() error {
			e.terminal.SetBracketedPasteMode(false)
			return term.Restore(fd, state)
		}, nil
	}
	return e, true
}

// A lineScanner reads lines that do not come from a terminal.
type lineScanner struct{ *bufio.Scanner }

func (s lineScanner) next() (string, error) {
	if s.Scan() {
		return s.Text(), nil
	}
	if err := s.Err(); errors.Is(err, bufio.ErrTooLong) {
		return "", fmt.Errorf("a line has more than %d bytes: shorten it", maxLine)
	} else if err != nil {
		return "", err
	}
	return "", io.EOF
}

// A lineEditor reads messages from a terminal, with a history of earlier ones. A message that is pasted can have
// several lines.
type lineEditor struct {
	terminal *term.Terminal
	keys     *keyReader
	// enter prepares the terminal for reading a line, and leave undoes it, so that Ctrl-C interrupts answers.
	enter func() (leave func() error, err error)
}

func newLineEditor(in io.Reader, out io.Writer) *lineEditor {
	keys := &keyReader{in: in}
	t := term.NewTerminal(struct {
		io.Reader
		io.Writer
	}{keys, out}, "> ")
	t.History = &history{}
	return &lineEditor{terminal: t, keys: keys, enter: func() (func() error, error) {
		return func() error { return nil }, nil
	}}
}

func (e *lineEditor) next() (string, error) {
	leave, err := e.enter()
	if err != nil {
		return "", err
	}

	var lines []string
	for {
		e.keys.interrupted = false
		line, err := e.terminal.ReadLine()
		lines = append(lines, line)
		if errors.Is(err, term.ErrPasteIndicator) {
			continue
		}
		if err == nil && e.keys.interrupted {
			err = errNoLine
		}
		return strings.Join(lines, "\n"), errors.Join(err, leave())
	}
}

// A history recalls earlier lines, without empty lines and without repetitions of the line before.
type history struct{ lines []string }

// maxHistory is the largest number of lines in a history.
const maxHistory = 1000

// Add implements term.History.
func (h *history) Add(line string) {
	if strings.TrimSpace(line) == "" || len(h.lines) > 0 && line == h.lines[len(h.lines)-1] {
		return
	}
	h.lines = append(h.lines, line)
	h.lines = h.lines[max(0, len(h.lines)-maxHistory):]
}

// Len implements term.History.
func (h *history) Len() int { return len(h.lines) }

// At implements term.History. The newest line has the index 0.
func (h *history) At(i int) string { return h.lines[len(h.lines)-1-i] }

// A keyReader turns Ctrl-C into keys that empty the line and end it. For package term, it would be the end of the
// input.
//
// It also replaces what is not UTF-8 by question marks, because package term would wait for more bytes.
type keyReader struct {
	in          io.Reader
	partial     []byte // start of a character
	rest        []byte // keys that have not been read
	interrupted bool
}

func (k *keyReader) Read(b []byte) (int, error) {
	for len(k.rest) == 0 {
		keys := make([]byte, len(b))
		n, err := k.in.Read(keys)
		if err != nil {
			return 0, err
		}
		k.add(keys[:n])
	}
	n := copy(b, k.rest)
	k.rest = k.rest[n:]
	return n, nil
}

// add adds bytes from the terminal.
func (k *keyReader) add(keys []byte) {
	keys = append(k.partial, keys...)
	var valid []byte
	for len(keys) > 0 && utf8.FullRune(keys) {
		r, n := utf8.DecodeRune(keys)
		if r == utf8.RuneError {
			r = '?'
		}
		valid, keys = utf8.AppendRune(valid, r), keys[n:]
	}
	k.partial = bytes.Clone(keys)

	const ctrlC, toEnd, deleteToStart = "\x03", "\x05", "\x15"
	k.interrupted = k.interrupted || bytes.Contains(valid, []byte(ctrlC))
	k.rest = append(k.rest, bytes.ReplaceAll(valid, []byte(ctrlC), []byte(toEnd+deleteToStart+"\r"))...)
}
