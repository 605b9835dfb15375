//go:build linux

package hf

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

// dropCached drops files from the system's page cache, as far as permitted.
func dropCached(t *testing.T, files []string) {
	for _, name := range files {
		f, err := os.Open(name)
		require.NoError(t, err)
		require.NoError(t, f.Sync())
		require.NoError(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
		require.NoError(t, f.Close())
	}
}

// readAll reads files with as many goroutines as loading uses, and returns the number of bytes.
func readAll(t *testing.T, files []string) (total int64) {
	const piece = 1 << 20
	type part struct {
		f  *os.File
		at int64
	}
	var parts []part
	for _, name := range files {
		f, err := os.Open(name)
		require.NoError(t, err)
		defer f.Close()
		info, err := f.Stat()
		require.NoError(t, err)
		total += info.Size()
		for at := int64(0); at < info.Size(); at += 64 * piece {
			parts = append(parts, part{f, at})
		}
	}

	todo := make(chan part, len(parts))
	for _, p := range parts {
		todo <- p
	}

	close(todo)
	var work sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		work.Go(func() {
			b := make([]byte, piece)
			for p := range todo {
				for i := range int64(64) {
					if n, err := p.f.ReadAt(b, p.at+i*piece); n == 0 && err == io.EOF {
						break
					}
				}
			}
		})
	}

	work.Wait()
	return total
}

// watch samples the memory of the process. The returned function stops sampling and returns the largest
// increase.
func watch(t *testing.T) (stop func() int64) {
	debug.FreeOSMemory()
	held := func() int64 {
		var size, pages int64
		text, err := os.ReadFile("/proc/self/statm")
		if err == nil {
			_, err = fmt.Sscan(string(text), &size, &pages)
		}
		require.NoError(t, err)
		return pages * int64(os.Getpagesize())
	}

	first, done, most := held(), make(chan struct{}), make(chan int64)
	go func() {
		peak := first
		for tick := time.NewTicker(5 * time.Millisecond); ; {
			select {
			case <-tick.C:
				peak = max(peak, held())
			case <-done:
				tick.Stop()
				most <- max(peak, held()) - first
				return
			}
		}
	}()

	return func() int64 {
		close(done)
		return <-most
	}
}

// TestLoadTime checks that loading the folder KASMINA_MODEL takes at most 1.3 times as long as reading
// its files, and less than 1.2 times the memory of the loaded model. It loads to the host, or in bfloat16
// to a GPU if KASMINA_DEVICE is cuda.
func TestLoadTime(t *testing.T) {
	dir := os.Getenv("KASMINA_MODEL")
	if dir == "" {
		t.Skip("KASMINA_MODEL names no folder of a large model")
	}

	files, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	require.NoError(t, err)
	f, err := Open(dir)
	require.NoError(t, err)
	defer f.Close()
	params := int64(0)
	for _, x := range f.Tensors() {
		n := int64(1)
		for _, d := range x.Shape {
			n *= int64(d)
		}
		params += n
	}

	timed := func(what string, load func()) float64 {
		dropCached(t, files)
		begin := time.Now()
		load()
		s := time.Since(begin).Seconds()
		t.Logf("%s: %.2f s, %.2f GB/s", what, s, float64(f.weights.bytes(f.Config))/s/1e9)
		return s
	}

	read := timed("reading", func() { readAll(t, files) })
	if os.Getenv("KASMINA_DEVICE") != "cuda" {
		stop := watch(t)
		s := timed("loading", func() {
			m, err := f.Load(t.Context())
			require.NoError(t, err)
			runtime.KeepAlive(m)
		})
		taken := stop()
		t.Logf("%.2f of reading, %.2f of what is kept", s/read, float64(taken)/float64(4*params))
		require.Less(t, s, 1.3*read)
		require.Less(t, taken, 4*params*12/10)
	}

	device := openGPU(t)
	small := open(t, "llama2") // loads libraries and kernels before the measurement
	warm, err := gpu.Load(t.Context(), device, cudaops.BFloat16, small.Config, small)
	require.NoError(t, err)
	require.NoError(t, warm.Close())
	read = min(read, timed("reading", func() { readAll(t, files) }))
	stop := watch(t)
	free, _, err := device.Memory()
	require.NoError(t, err)
	var i *llm.Inference
	s := timed("loading to the GPU", func() {
		i, err = gpu.Load(t.Context(), device, cudaops.BFloat16, f.Config, f)
		require.NoError(t, err)
		left, _, err := device.Memory()
		require.NoError(t, err)
		t.Logf("the GPU holds %.2f bytes a parameter", float64(free-left)/float64(params))
		require.Less(t, free-left, uint64(2*params*12/10))
		t.Cleanup(func() { require.NoError(t, i.Close()) })
	})

	taken := stop()
	t.Logf("%.2f of reading, and the host took %.0f MiB", s/read, float64(taken)/(1<<20))
	require.Less(t, s, 1.3*read)
	require.Less(t, taken, int64(1<<30))
	greedy, err := sampler.New(sampler.Config{})
	require.NoError(t, err)
	for _, at := range []int{100, 1000, 4000} {
		prompt := make([]int, at)
		for n := range prompt {
			prompt[n] = 7 * n % f.Config.Vocab
		}
		for _, tokens := range []int{4, 132} { // the first run creates machines and records their work
			begin, n := time.Now(), 0
			var first time.Duration
			for _, err := range llm.GeneratorOf(f.Config, i.Decoder).Generate(t.Context(), prompt, tokens,
				greedy) {
				require.NoError(t, err)
				if n++; n == 4 {
					begin = time.Now()
				} else if n == 1 {
					first = time.Since(begin)
				}
			}
			if tokens > 4 {
				t.Logf("after %d tokens, which take %.1f ms, %.0f tokens/s", at,
					first.Seconds()*1e3, float64(tokens-4)/time.Since(begin).Seconds())
			}
		}
	}
}
