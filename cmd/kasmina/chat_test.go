package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"iter"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/serve"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

// parrot is a generator that records prompts and answers with the same tokens.
type parrot struct {
	prompts [][]int
	answer  []int
	each    func(ctx context.Context) // called before each token
}

func (p *parrot) Generate(ctx context.Context, prompt []int, n int, _ *sampler.Sampler) iter.Seq2[int, error] {
	p.prompts = append(p.prompts, prompt)
	return func(yield func(int, error) bool) {
		for i := range n {
			if p.each != nil {
				p.each(ctx)
			}
			if ctx.Err() != nil {
				yield(0, context.Cause(ctx))
				return
			}
			if !yield(p.answer[i%len(p.answer)], nil) {
				return
			}
		}
	}
}

// newTalk returns a conversation with a parrot and a context of n tokens.
func newTalk(t *testing.T, n int) (*talk, *parrot, *bytes.Buffer) {
	tok, err := tokenizers.Load(tiny)
	require.NoError(t, err)
	template, err := chat.Load(tiny)
	require.NoError(t, err)
	p := &parrot{answer: append(tok.Encode([]byte("Aye")), 1)}
	m := &serve.Model{Name: "tiny", Generator: p, Tokenizer: tok, Template: template, Context: n, Vocab: 400,
		End: []int{1}}
	var out bytes.Buffer
	return &talk{model: m, n: 50, out: &out, err: t.Output()}, p, &out
}

// TestChat checks the prompts that the model receives and the answers that the user sees.
func TestChat(t *testing.T) {
	talk, p, out := newTalk(t, 1000)
	talk.system = "Be kind."
	require.NoError(t, talk.run(t.Context(), strings.NewReader("one\n\ntwo\n/new\nthree")))
	require.Equal(t, "Aye\nAye\nAye\n", out.String())

	var prompts []string
	for _, ids := range p.prompts {
		text, err := talk.model.Tokenizer.Decode(ids)
		require.NoError(t, err)
		prompts = append(prompts, string(text))
	}
	require.Equal(t, []string{
		"system: Be kind.\nuser: one\nassistant: ",
		"system: Be kind.\nuser: one\nassistant: Aye\nuser: two\nassistant: ",
		"system: Be kind.\nuser: three\nassistant: ",
	}, prompts)

	// The oldest turns are left out once the conversation fills half of the context.
	talk, p, _ = newTalk(t, 100)
	require.NoError(t, talk.run(t.Context(), strings.NewReader(strings.Repeat("hello\n", 20))))
	require.Len(t, p.prompts, 20)
	for _, ids := range p.prompts {
		require.LessOrEqual(t, len(ids), 50)
	}
	require.Less(t, len(talk.messages), 12)

	// A stop text ends an answer, and is not part of it.
	talk, _, out = newTalk(t, 1000)
	talk.stops = []string{"ye"}
	require.NoError(t, talk.run(t.Context(), strings.NewReader("one\n")))
	require.Equal(t, "A\n", out.String())
	require.Equal(t, "A", talk.messages[1].Content)
	talk.stops = []string{"yes"} // only its start
	require.NoError(t, talk.run(t.Context(), strings.NewReader("two\n")))
	require.Equal(t, "A\nAye\n", out.String())

	// A message that is too long is rejected, and the conversation goes on.
	talk, p, out = newTalk(t, 100)
	require.NoError(t, talk.run(t.Context(), strings.NewReader(strings.Repeat("long ", 100)+"\nshort\n")))
	require.Equal(t, "\nAye\n", out.String())
	require.Len(t, p.prompts, 1)

	// So is a line without end.
	talk, _, _ = newTalk(t, 100)
	require.ErrorContains(t, talk.run(t.Context(), strings.NewReader(strings.Repeat("a", maxLine+1))),
		"a line has more than 1048576 bytes: shorten it")

	// Without a template, each line is continued as it is.
	talk, p, _ = newTalk(t, 100)
	talk.model.Template = nil
	require.NoError(t, talk.run(t.Context(), strings.NewReader("Once\nTwice\n")))
	before, _ := talk.model.Tokenizer.Affixes()
	require.Equal(t, append(before, talk.model.Tokenizer.Encode([]byte("Twice"))...), p.prompts[1])
}

// TestChatInterrupt checks that an interrupt stops an answer and not the conversation.
func TestChatInterrupt(t *testing.T) {
	randtest.Concurrent(t)
	talk, p, out := newTalk(t, 1000)
	p.answer = p.answer[:1]
	self, err := os.FindProcess(os.Getpid())
	require.NoError(t, err)
	tokens := 0
	p.each = func(ctx context.Context) {
		if tokens++; tokens == 3 {
			require.NoError(t, self.Signal(os.Interrupt))
			select {
			case <-ctx.Done():
			case <-time.After(2 * time.Minute):
				t.Error("the interrupt does not stop the answer")
			}
		}
	}
	require.NoError(t, talk.run(t.Context(), strings.NewReader("one\ntwo\n")))
	first, second, _ := strings.Cut(out.String(), "\n")
	require.Len(t, talk.messages, 4)
	require.Equal(t, talk.messages[1].Content, first)
	require.Less(t, len(first), len(second)/10)
}

// TestChatCommand runs the command with a model. Texts depend on the seed.
func TestChatCommand(t *testing.T) {
	say := func(args ...string) (string, string, error) {
		root := newRoot()
		var stdout, stderr bytes.Buffer
		root.SetIn(strings.NewReader("Permission\nMore\n"))
		root.SetOut(&stdout)
		root.SetErr(&stderr)
		root.SetArgs(append([]string{"chat", "--device", "cpu", "-n", "15"}, args...))
		err := root.ExecuteContext(t.Context())
		return stdout.String(), stderr.String(), err
	}
	greedy, _, err := say("-m", tiny)
	require.NoError(t, err)
	want, err := kasmina(t, "generate", "-m", tiny, "--chat", "-p", "Permission", "-n", "15", "--device", "cpu")
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(greedy, want), "%q %q", greedy, want)

	one, _, err := say("-m", tiny, "-t", "2", "--seed", "1")
	require.NoError(t, err)
	two, _, err := say("-m", tiny, "-t", "2", "--seed", "2")
	require.NoError(t, err)
	require.NotEqual(t, one, two)

	base := filepath.Join(t.TempDir(), "base")
	require.NoError(t, os.CopyFS(base, os.DirFS(tiny)))
	require.NoError(t, os.Remove(filepath.Join(base, "chat_template.jinja")))
	plain, told, err := say("-m", base)
	require.NoError(t, err)
	require.Contains(t, told, "the model continues each text as it is: there is no chat template\n")
	require.NotEqual(t, greedy, plain)
	_, _, err = say("-m", base, "--system", "Be kind.")
	require.ErrorContains(t, err, "--system needs a chat template")
}

// TestServeCommand starts the server, follows its own advice, and stops it during an answer.
func TestServeCommand(t *testing.T) {
	randtest.Concurrent(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, w := io.Pipe()
	var told bytes.Buffer
	ended := make(chan error, 1)
	go func() {
		ended <- run(ctx, []string{"serve", "--model", tiny, "--device", "cpu", "--addr", "127.0.0.1:0", "--api-key",
			"first", "--api-key", "second", "--context", "100"}, w, &told)
		w.Close()
	}()

	lines := bufio.NewScanner(r)
	require.True(t, lines.Scan())
	require.Contains(t, lines.Text(), "serving   tiny at http://127.0.0.1:")
	require.True(t, lines.Scan())
	advice := regexp.MustCompile(`curl (\S+) -H 'Authorization: Bearer KEY' -d '(.*)'`).FindStringSubmatch(lines.Text())
	require.Len(t, advice, 3, lines.Text())

	ask := func(key, body string) *http.Response {
		q, err := http.NewRequest("POST", advice[1], strings.NewReader(body))
		require.NoError(t, err)
		q.Header.Set("Authorization", "Bearer "+key)
		answer, err := http.DefaultClient.Do(q)
		require.NoError(t, err)
		return answer
	}
	answer := ask("third", advice[2])
	answer.Body.Close()
	require.Equal(t, 401, answer.StatusCode)

	answer = ask("second", advice[2])
	var whole struct {
		Model string
		Usage struct {
			Total int `json:"total_tokens"`
		}
		Choices []struct {
			Message struct{ Content string }
		}
	}
	require.NoError(t, json.NewDecoder(answer.Body).Decode(&whole))
	answer.Body.Close()
	require.Equal(t, "tiny", whole.Model)
	require.NotEmpty(t, whole.Choices[0].Message.Content)
	require.LessOrEqual(t, whole.Usage.Total, 100)

	answer = ask("first", strings.Replace(advice[2], "{", `{"stream":true,`, 1))
	cancel()
	text, err := io.ReadAll(answer.Body)
	answer.Body.Close()
	require.NoError(t, err)
	require.True(t, strings.HasSuffix(string(text), "data: [DONE]\n\n"), "%s", text)
	http.DefaultClient.CloseIdleConnections()
	require.ErrorIs(t, <-ended, context.Canceled)
}

// TestServeErrors checks that the server does not start with wrong options.
func TestServeErrors(t *testing.T) {
	for want, args := range map[string]string{
		"--addr":           "--addr 127.0.0.1:99999",
		"a context of 128": "--addr 127.0.0.1:0 --context 129",
		"--context is 1":   "--context 1",
		"--cors is":        "--cors https://example.com/page",
		"--slots is 0":     "--slots 0",
		"--timeout is 0s":  "--timeout 0",
		"--api-key":        "--api-key=",
	} {
		_, err := kasmina(t, append([]string{"serve", "-m", tiny, "--device", "cpu"}, strings.Fields(args)...)...)
		require.ErrorContains(t, err, want)
	}
}

// TestChatCommands checks that /exit ends a conversation, and that unknown commands do not reach the model.
func TestChatCommands(t *testing.T) {
	talk, p, out := newTalk(t, 1000)
	var notes bytes.Buffer
	talk.err = &notes
	require.NoError(t, talk.run(t.Context(), strings.NewReader("/help\n/etc/passwd is a file\n/exit\nlost\n")))
	require.Equal(t, "Aye\n", out.String())
	require.Len(t, p.prompts, 1)
	require.Contains(t, notes.String(), "there is no command /help: Ctrl-C stops")
}

// TestLineEditor checks that a terminal recalls messages, that several pasted lines are one message, and that Ctrl-C
// drops a line while Ctrl-D ends the conversation.
func TestLineEditor(t *testing.T) {
	in, keys := io.Pipe()
	e := newLineEditor(in, io.Discard)
	left := 0
	e.enter = func() (func() error, error) {
		return func() error { left++; return nil }, nil
	}
	const up, left1 = "\x1b[A", "\x1b[D"
	for _, k := range []struct {
		keys, line string
		err        error
	}{
		{"hello\r", "hello", nil},
		{up + "!\r", "hello!", nil},
		{up + up + left1 + "0\r", "hell0o", nil},
		{"half\x03", "", errNoLine},
		{"\r", "", nil},
		{up + "\r", "hell0o", nil}, // Ctrl-C and an empty line leave no trace
		{up + up + "\r", "hello!", nil},
		{"caf\xe9 \xff\xfe \uFFFD 世\r", "caf? ?? ? 世", nil},
		{"\x1b[200~one\ntwo\nthree\x1b[201~ four\r", "one\ntwo\nthree four", nil},
		{"\x04", "", io.EOF},
	} {
		go io.WriteString(keys, k.keys)
		line, err := e.next()
		if k.err != nil {
			require.ErrorIs(t, err, k.err, "%q", k.keys)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, k.line, line, "%q", k.keys)
	}
	require.Equal(t, 10, left)

	// A character can arrive in two parts.
	e = newLineEditor(in, io.Discard)
	go func() {
		io.WriteString(keys, "a\xe4")
		io.WriteString(keys, "\xb8\x96\r")
	}()
	line, err := e.next()
	require.NoError(t, err)
	require.Equal(t, "a世", line)
}
