package main

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"strings"

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
	if err := s.Err(); err != nil {
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

// A keyReader turns Ctrl-C into keys that empty the line and end it. For package term, it would be the end of the
// input.
type keyReader struct {
	in          io.Reader
	rest        []byte // keys that have not been read
	interrupted bool
}

func (k *keyReader) Read(b []byte) (int, error) {
	if len(k.rest) == 0 {
		keys := make([]byte, len(b))
		n, err := k.in.Read(keys)
		if err != nil {
			return 0, err
		}
		const ctrlC, toEnd, deleteToStart = "\x03", "\x05", "\x15"
		k.interrupted = k.interrupted || bytes.Contains(keys[:n], []byte(ctrlC))
		k.rest = bytes.ReplaceAll(keys[:n], []byte(ctrlC), []byte(toEnd+deleteToStart+"\r"))
	}
	n := copy(b, k.rest)
	k.rest = k.rest[n:]
	return n, nil
}
