package launch

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"sync"
	"time"
)

// merged writes the lines of all processes without interleaving them.
type merged struct {
	mu             sync.Mutex
	stdout, stderr io.Writer
	err            error // first write error; the processes continue without their output
}

func (m *merged) write(to io.Writer, line []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err == nil {
		_, m.err = to.Write(line)
	}
}

// output reads the output of one process.
type output struct {
	mux    *merged
	prefix string
	last   tail
	ours   []*os.File // read ends, used by this process
	theirs []*os.File
	wg     sync.WaitGroup
}

// newOutput creates pipes for the output of a command, which must be started next.
func newOutput(cmd *exec.Cmd, m *merged, prefix string) (*output, error) {
	o := &output{mux: m, prefix: prefix}
	for _, f := range []*io.Writer{&cmd.Stdout, &cmd.Stderr} {
		r, w, err := os.Pipe()
		if err != nil {
			o.closeAll()
			return nil, err
		}
		o.ours, o.theirs = append(o.ours, r), append(o.theirs, w)
		*f = w
	}

	return o, nil
}

func (o *output) closeAll() {
	for _, f := range append(o.ours, o.theirs...) {
		f.Close()
	}
}

// started starts reading, unless the command failed to start.
func (o *output) started(err error) error {
	if err != nil {
		o.closeAll()
		return err
	}
	for _, f := range o.theirs {
		err = errors.Join(err, f.Close())
	}
	o.wg.Go(func() { o.copyLines(o.ours[0], o.mux.stdout, nil) })
	o.wg.Go(func() { o.copyLines(o.ours[1], o.mux.stderr, &o.last) })
	return err
}

// maxLine is the maximum length of a line. Longer lines are split.
const maxLine = 64 << 10

func (o *output) copyLines(from io.Reader, to io.Writer, last *tail) {
	line := append(make([]byte, 0, 4096), o.prefix...)
	emit := func(text []byte) {
		if last != nil {
			last.add(string(bytes.TrimSuffix(text, []byte("\n"))))
		}
		line = append(append(line[:len(o.prefix)], text...), '\n')
		if bytes.HasSuffix(text, []byte("\n")) {
			line = line[:len(line)-1]
		}
		o.mux.write(to, line)
	}

	buffer, n := make([]byte, maxLine), 0
	for {
		k, err := from.Read(buffer[n:])
		n += k
		rest := buffer[:n]
		for {
			i := bytes.IndexByte(rest, '\n')
			if i < 0 {
				break
			}
			emit(rest[:i+1])
			rest = rest[i+1:]
		}
		if len(rest) == maxLine || err != nil && len(rest) > 0 {
			emit(rest)
			rest = nil
		}
		n = copy(buffer, rest)
		if err != nil {
			return
		}
	}
}

// drain waits until all output has been read. A descendant that survives the process group may hold the
// pipes open, so drain closes them after patience.
func (o *output) drain(patience time.Duration) error {
	closing := time.AfterFunc(patience, func() {
		for _, f := range o.ours {
			f.Close()
		}
	})
	o.wg.Wait()
	if closing.Stop() {
		for _, f := range o.ours {
			f.Close()
		}
	}

	o.mux.mu.Lock()
	defer o.mux.mu.Unlock()
	return o.mux.err
}

// tail keeps the last lines of an output.
type tail struct {
	mu   sync.Mutex
	kept []string
}

const tailLines = 20

func (t *tail) add(line string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.kept) == tailLines {
		t.kept = slices.Delete(t.kept, 0, 1)
	}
	t.kept = append(t.kept, line)
}

func (t *tail) lines() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.kept)
}
