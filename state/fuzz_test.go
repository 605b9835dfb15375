package state

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"reflect"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
)

// FuzzNetworkLoad gives a network its own arrays with one of them altered, the header's checksum
// and the seeds' made right again if repair says so. They are refused and nothing has changed, or
// the network holds them and goes on.
func FuzzNetworkLoad(f *testing.F) {
	for which := range uint8(6) {
		f.Add(which, uint16(3), []byte{255}, which%2 == 0)
	}
	f.Add(uint8(0), uint16(prefix), []byte(`{"schema":1,"seeds":2,"hidden":1000000000000`), true)
	f.Fuzz(func(t *testing.T, which uint8, at uint16, data []byte, repair bool) {
		l, err := NewLattice(2, 4, WithoutGates(), WithSlots(3), WithWidth(2))
		require.NoError(t, err)
		n, err := NewNetwork(nil, Layer{Name: "a", Lattice: l})
		require.NoError(t, err)
		require.NoError(t, l.RequestGermination(0, GerminationRequest{Slot: 1}))
		before, arrays := fmt.Sprint(n.Arrays()), n.Arrays()
		memory := bytesOf(arrays[int(which)%len(arrays)].Data)
		if int(at) < len(memory) {
			copy(memory[at:], data)
		}
		if repair {
			renew(arrays)
		}
		var install func()
		bounded.Run(t, int64(len(data)), func() { install, err = n.Load(arrays) })
		require.True(t, before == fmt.Sprint(n.Arrays()), "Load itself changes something")
		if err != nil {
			return
		}
		install()
		require.NoError(t, n.Verify())
		_, err = n.StepEpoch([]Metrics{{}})
		_ = err // there may be no figures to go by; it must not panic
		n.Report()
		n.Arrays()
	})
}

// bytesOf views the memory of a slice of numbers.
func bytesOf(data any) []byte {
	v := reflect.ValueOf(data)
	return unsafe.Slice((*byte)(v.UnsafePointer()), v.Len()*int(v.Type().Elem().Size()))
}

// renew makes the checksums of arrays right, where the header can be read.
func renew(arrays []Array) {
	head := arrays[0].Data.([]uint8)
	size := min(len(head)-prefix, int(binary.LittleEndian.Uint32(head[len(magic):])))
	binary.LittleEndian.PutUint32(head[len(magic)+4:], crc32.ChecksumIEEE(head[prefix:][:size]))
	h, _, err := parseHead(head)
	if err != nil || h.Seeds != 2 {
		return
	}
	var columns []column
	for _, a := range arrays[1 : len(arrays)-1] {
		p := reflect.New(reflect.TypeOf(a.Data))
		p.Elem().Set(reflect.ValueOf(a.Data))
		_, name, _ := strings.Cut(a.Name, ".")
		columns = append(columns, column{name, p.Interface()})
	}
	sums := arrays[len(arrays)-1].Data.([]uint32)
	newChecksummer(columns, h.Schema).each(0, h.Seeds, func(seed int, sum uint32) { sums[seed] = sum })
}
