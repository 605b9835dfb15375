package cudaops

import (
	"errors"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

func TestOpenFake(t *testing.T) {
	f := fake.New(fake.Config{Devices: []gpu.DeviceInfo{
		{Name: "A", Major: 9, Memory: 1 << 30, SMs: 132}, {Name: "B", Major: 8, Minor: 9, Memory: 3 << 29, SMs: 66},
		{Name: "C", Major: 7, Minor: 5}}})
	d, err := Open(withDriver(f), WithOrdinal(1))
	if err != nil {
		t.Fatal(err)
	}
	major, minor := d.ComputeCapability()
	if d.Name() != "B" || d.Ordinal() != 1 || major != 8 || minor != 9 {
		t.Errorf("got %s, GPU %d, %d.%d", d.Name(), d.Ordinal(), major, minor)
	}
	const want = "B (GPU 1, compute capability 8.9, 1.50 GiB, 66 multiprocessors, driver for CUDA 13.0)"
	if d.String() != want {
		t.Errorf("String() = %q, want %q", d, want)
	}
	p, err := d.ctx.Alloc(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	if free, total, err := d.Memory(); err != nil || total != 3<<29 || total-free != 1<<20 {
		t.Errorf("Memory() = %d, %d, %v", free, total, err)
	}
	if err := d.ctx.Free(p); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, _, err := d.Memory(); !errors.Is(err, gpu.ContextIsDestroyed) {
		t.Errorf("Memory after Close: %v", err)
	}
	for _, n := range []int{-1, 3} {
		if _, err := Open(withDriver(f), WithOrdinal(n)); err == nil || errors.Is(err, ErrNoDevice) ||
			!strings.Contains(err.Error(), "there are 3") {
			t.Errorf("ordinal %d: %v", n, err)
		}
	}
	if _, err := Open(withDriver(f), WithOrdinal(2)); !errors.Is(err, ErrUnsupportedDevice) ||
		!strings.Contains(err.Error(), "C has compute capability 7.5") {
		t.Errorf("old GPU: %v", err)
	}
	f.Fail("cuDevicePrimaryCtxRetain", 1, gpu.OutOfMemory)
	if _, err := Open(withDriver(f)); !errors.Is(err, gpu.OutOfMemory) || errors.Is(err, ErrNoDevice) {
		t.Errorf("failed context: %v", err)
	}
}

// TestZeroDevice wants a device that Open has not made refused wherever it is used.
func TestZeroDevice(t *testing.T) {
	var d Device
	g := gorgonia.NewGraph()
	_, _, memory := d.Memory()
	_, machine := NewMachine(&d, g)
	for name, err := range map[string]error{"Memory": memory, "NewMachine": machine, "Close": d.Close()} {
		if !errors.Is(err, errNotOpened) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if d.Context() != 0 {
		t.Error("it has a context")
	}
}

func TestOpenWithout(t *testing.T) {
	none := fake.New(fake.Config{Devices: []gpu.DeviceInfo{}})
	if _, err := Open(withDriver(none)); !errors.Is(err, ErrNoDevice) {
		t.Errorf("no GPU listed: %v", err)
	}
	for _, c := range []struct {
		err      error
		noDevice bool
		say      string
	}{
		{&gpu.NotFoundError{Library: "libcuda", Tried: []gpu.Attempt{{Place: "/usr/lib", Reason: "no such file"}},
			Help: "Install it."}, true, "Install it.\nSearched, in this order:\n  /usr/lib: no such file"},
		{gpu.NewError("cuInit", gpu.NoDevice, "no CUDA-capable device is detected", ""), true, "CUDA_ERROR_NO_DEVICE"},
		{gpu.NewError("cuInit", gpu.StubLibrary, "", ""), true, "CUDA_ERROR_STUB_LIBRARY"},
		{gpu.NewError("cuInit", gpu.SystemDriverMismatch, "", ""), false, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
	} {
		open := func(o *deviceOptions) { o.open = func() (gpu.Driver, error) { return nil, c.err } }
		_, err := Open(open)
		if errors.Is(err, ErrNoDevice) != c.noDevice || !strings.Contains(err.Error(), c.say) {
			t.Errorf("%v: got %v", c.err, err)
		}
	}
}

// TestOpenHere opens what this machine has: a GPU, or the reason why there is none.
func TestOpenHere(t *testing.T) {
	d, err := Open()
	if err == nil {
		t.Log(d)
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		return
	}
	if !errors.Is(err, ErrNoDevice) && !errors.Is(err, ErrUnsupportedDevice) {
		t.Errorf("neither a GPU nor a reason: %v", err)
	}
	t.Log(err)
}
