// Package fatbin reads the signatures of kernels from fat binaries, so that launches can be checked
// without a GPU.
//
// A fat binary holds machine code for several architectures, and PTX. The machine code gives the
// kernels of an architecture and the offsets and sizes of their parameters. The PTX identifies the
// parameters that are floating-point numbers.
package fatbin

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// The kinds of images in a fat binary.
const (
	ptxImage  = 1
	codeImage = 2 // machine code, as an ELF file
)

// image is one part of a fat binary.
type image struct {
	kind   int
	arch   int // compute capability: 90 for 9.0
	packed []byte
}

// unpack returns the decompressed image.
func (i image) unpack() ([]byte, error) {
	data, err := unpacker.DecodeAll(i.packed, nil)
	if err != nil {
		return nil, fmt.Errorf("fatbin: %w", err)
	}
	return data, nil
}

var unpacker, _ = zstd.NewReader(nil) // fails only for invalid options

// images splits a fat binary, which consists of a header of 16 bytes and images with their own
// headers.
func images(binary []byte) (all []image, err error) {
	if len(binary) < 16 {
		return nil, fmt.Errorf("fatbin: %d bytes are too few for a fat binary", len(binary))
	}

	const minHeader = 64 // size of an image's header
	for left := binary[16:]; len(left) >= minHeader; {
		kind, header, size, packed, arch := readHeader(left)
		if header+packed > len(left) || header+size > len(left) || header+size < minHeader {
			return nil, fmt.Errorf("fatbin: an image of %d bytes in the last %d", size, len(left))
		}
		all = append(all, image{kind, arch, left[header:][:packed]})
		left = left[header+size:]
	}

	return all, nil
}

func readHeader(b []byte) (kind, header, size, packed, arch int) {
	return int(binary.LittleEndian.Uint16(b)), int(binary.LittleEndian.Uint32(b[4:])),
		int(binary.LittleEndian.Uint64(b[8:])), int(binary.LittleEndian.Uint32(b[16:])),
		int(binary.LittleEndian.Uint32(b[28:]))
}

// Signatures returns the signatures of the kernels in the PTX of a fat binary.
func Signatures(binary []byte) (Table, error) {
	all, err := images(binary)
	if err != nil {
		return nil, err
	}

	i := slices.IndexFunc(all, func(i image) bool { return i.kind == ptxImage })
	if i < 0 {
		return nil, errors.New("fatbin: no PTX")
	}

	ptx, err := all[i].unpack()
	if err != nil {
		return nil, err
	}

	table := Table{}
	for _, entry := range ptxEntry.FindAllSubmatch(ptx, -1) {
		signature, err := ptxParams(string(entry[2]))
		if err != nil {
			return nil, fmt.Errorf("fatbin: kernel %s: %w", entry[1], err)
		}
		table[string(entry[1])] = signature
	}

	return table, nil
}

var (
	ptxEntry = regexp.MustCompile(`\.entry\s+(\w+)\s*\(([^)]*)\)`)
	ptxParam = regexp.MustCompile(
		`\.param\s+(?:\.align\s+\d+\s+)?\.(u64|u32|s32|s64|f32|b8|b32|b64)\b[^\[]*(?:\[(\d+)\])?`)
)

// ptxParams reads a parameter list of PTX.
func ptxParams(list string) (Signature, error) {
	signature := Signature{}
	for text := range strings.SplitSeq(list, ",") {
		text = strings.TrimSpace(text)
		if text == "" {
			continue
		}
		m := ptxParam.FindStringSubmatch(text)
		if m == nil {
			return nil, fmt.Errorf("parameter %q has an unknown kind", text)
		}

		p := Param{Size: 4, Kind: gpu.Integer}
		switch t := m[1]; {
		case t == "b8":
			p.Kind = gpu.Structure
			p.Size, _ = strconv.Atoi(m[2]) // digits, by the pattern
		case t == "f32":
			p.Kind = gpu.Float
		case strings.HasSuffix(t, "64"):
			p.Size = 8
		}
		signature = append(signature, p)
	}

	return signature, nil
}

// Layouts returns the parameters of the kernels in the machine code for a compute capability, by
// kernel name. Their kinds are unknown.
func Layouts(binary []byte, capability int) (map[string][]gpu.Param, error) {
	all, err := images(binary)
	if err != nil {
		return nil, err
	}

	var best image
	for _, i := range all {
		if i.kind == codeImage && i.arch/10 == capability/10 && i.arch <= capability &&
			i.arch > best.arch {
			best = i
		}
	}

	if best.packed == nil {
		return nil, fmt.Errorf("fatbin: no machine code for compute capability %d", capability)
	}

	code, err := best.unpack()
	if err != nil {
		return nil, err
	}

	file, err := elf.NewFile(bytes.NewReader(code))
	if err != nil {
		return nil, fmt.Errorf("fatbin: %w", err)
	}

	layouts := map[string][]gpu.Param{}
	for _, s := range file.Sections { // each kernel has a section of attributes
		if name, ok := strings.CutPrefix(s.Name, ".nv.info."); ok {
			info, err := s.Data()
			if err != nil {
				return nil, fmt.Errorf("fatbin: %w", err)
			}
			layouts[name] = layout(info)
		}
	}

	return layouts, nil
}

const (
	sized     = 4    // the format of an attribute with a length and that number of bytes
	paramInfo = 0x17 // the attribute that describes one parameter
)

// layout reads a kernel's parameters from its attributes.
func layout(info []byte) []gpu.Param {
	found := []gpu.Param{}
	for len(info) >= 4 {
		form, attribute, n := info[0], info[1], int(binary.LittleEndian.Uint16(info[2:]))
		info = info[4:]
		if form != sized {
			continue
		}

		// index, ordinal, offset, and the size in the highest 14 bits
		if attribute == paramInfo {
			found = append(found, gpu.Param{Offset: int(binary.LittleEndian.Uint16(info[6:])),
				Size: int(binary.LittleEndian.Uint32(info[8:]) >> 18)})
		}
		info = info[n:]
	}

	slices.SortFunc(found, func(a, b gpu.Param) int { return a.Offset - b.Offset })
	return found
}
