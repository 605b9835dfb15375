package kerneltest

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Kernels lists the kernels that the fat binary of a unit has for GPUs of a compute capability, and
// the layout of their parameters. It is for [fake.Config].
func Kernels(image []byte, capability int) (map[string][]gpu.Param, error) {
	read, _ := binaries.LoadOrStore(binaryKey{&image[0], capability},
		sync.OnceValues(func() (map[string][]gpu.Param, error) {
			return kernels(image, capability)
		}))
	return read.(func() (map[string][]gpu.Param, error))()
}

// binaries is what Kernels has read before.
var binaries sync.Map

var unpacker, _ = zstd.NewReader(nil) // which fails for wrong options alone

type binaryKey struct {
	image      *byte
	capability int
}

// machineCode is the kind of an image with code of one architecture; the others are PTX.
const machineCode = 2

// kernels reads a fat binary: a header of 16 bytes, and images, each behind a header of its own.
func kernels(image []byte, capability int) (map[string][]gpu.Param, error) {
	var code []byte
	best := 0
	for left := image[16:]; len(left) >= 64; {
		kind, header := binary.LittleEndian.Uint16(left), binary.LittleEndian.Uint32(left[4:])
		size, packed := binary.LittleEndian.Uint64(left[8:]), binary.LittleEndian.Uint32(left[16:])
		arch := int(binary.LittleEndian.Uint32(left[28:]))
		if kind == machineCode && arch/10 == capability/10 && arch <= capability && arch > best {
			best, code = arch, left[header:][:packed]
		}
		left = left[uint64(header)+size:]
	}
	if code == nil {
		return nil, fmt.Errorf("no machine code for compute capability %d", capability)
	}
	code, err := unpacker.DecodeAll(code, nil)
	if err != nil {
		return nil, err
	}
	file, err := elf.NewFile(bytes.NewReader(code))
	if err != nil {
		return nil, err
	}
	all := map[string][]gpu.Param{}
	for _, s := range file.Sections { // of which each kernel has one of information
		if name, ok := strings.CutPrefix(s.Name, ".nv.info."); ok {
			info, err := s.Data()
			if err != nil {
				return nil, err
			}
			all[name] = params(info)
		}
	}
	return all, nil
}

const (
	sized     = 4    // the form of an attribute with a length and so many bytes
	paramInfo = 0x17 // the attribute of one parameter
)

// params reads a kernel's parameters from its attributes.
func params(info []byte) []gpu.Param {
	found := []gpu.Param{}
	for len(info) >= 4 {
		form, attribute, n := info[0], info[1], int(binary.LittleEndian.Uint16(info[2:]))
		info = info[4:]
		if form != sized {
			continue
		}
		if attribute == paramInfo { // index, ordinal, offset, and the size in the highest 14 bits
			found = append(found, gpu.Param{Offset: int(binary.LittleEndian.Uint16(info[6:])),
				Size: int(binary.LittleEndian.Uint32(info[8:]) >> 18)})
		}
		info = info[n:]
	}
	slices.SortFunc(found, func(a, b gpu.Param) int { return a.Offset - b.Offset })
	return found
}
