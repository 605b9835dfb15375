// Command build compiles units of kernels with nvcc if their sources have changed, and writes the
// signatures of all kernels to signatures.txt. It then runs the tests that compare the arguments of
// launches with these signatures.
//
// It must run in the folder that contains the families' folders, as it does with go generate. A
// unit's headers are in its own folder, in hopper, or in include.
package main

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/fatbin"
)

// targets cover Ampere, Ada, Hopper including its specific instructions, and Blackwell. The PTX for
// compute_80 runs on any other GPU since the A100.
const targets = "sm_80,sm_89,sm_90a,sm_100,compute_80"

var flags = []string{"-std=c++17", "-O3", "--compress-mode=size"}

func main() {
	log.SetFlags(0)
	flag.Parse() // there are no options, but --help and mistakes must not start a build
	if flag.NArg() > 0 {
		log.Fatalf("build takes no arguments, got %q", flag.Args())
	}

	if err := build("."); err != nil {
		log.Fatal(err)
	}

	if err := checkLaunches(); err != nil {
		log.Fatal(err)
	}
}

// checkLaunches runs the tests that compare the arguments of launches with the signatures of the
// kernels.
func checkLaunches() error {
	cmd := exec.Command("go", "test", "-run", "Launch|Signatures|Copies|Pick", "./...")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("launches do not fit the kernels' signatures: %w", err)
	}
	return nil
}

// build compiles the units of a folder that have changed.
func build(dir string) error {
	names, err := units(dir)
	if err != nil {
		return err
	}

	if len(names) == 0 {
		return errors.New("no kernels found in this folder: run go generate ./cudaops/internal/kernel")
	}

	for _, name := range names {
		sum, err := sourceHash(dir, name)
		if err != nil {
			return err
		}
		if bytes.Equal(binaryHash(dir, name), sum) {
			continue
		}
		log.Print(name)
		if err := compile(dir, name, sum); err != nil {
			return fmt.Errorf("%s.cu: %w", name, err)
		}
	}

	return writeSignatures(dir, names)
}

// signatures is the name of the file with the signatures of all kernels.
const signatures = "signatures.txt"

// writeSignatures writes the signatures of the kernels in the binaries of the given units.
func writeSignatures(dir string, units []string) error {
	all := fatbin.Table{}
	for _, name := range units {
		binary, err := os.ReadFile(filepath.Join(dir, name+".fatbin"))
		if err != nil {
			return err
		}
		kernels, err := fatbin.Signatures(binary[:len(binary)-sha256.Size])
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		maps.Copy(all, kernels)
	}

	text, err := all.MarshalText()
	if err != nil {
		return err
	}

	return os.WriteFile(filepath.Join(dir, signatures), text, 0o644)
}

// units lists the .cu files in the families' folders, without the extension.
func units(dir string) ([]string, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*", "*.cu"))
	for i, p := range paths {
		family, file := filepath.Split(p)
		paths[i] = filepath.Join(filepath.Base(family), strings.TrimSuffix(file, ".cu"))
	}
	return paths, err
}

// headers lists the folders with headers that several families include.
var headers = []string{"hopper", "include"}

// read reads a source file of a family, from the family's folder or a folder of headers.
func read(dir, family, name string) (text []byte, err error) {
	for _, folder := range append([]string{family}, headers...) {
		text, err = os.ReadFile(filepath.Join(dir, folder, name))
		if !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	return text, err
}

var include = regexp.MustCompile(`(?m)^\s*#\s*include\s+"([^"]+)"`)

var (
	// Strings may contain //, and a backslash at the end of a comment continues it on the next
	// line.
	comment      = regexp.MustCompile(`(?m)^((?:"[^"\n]*"|[^"\n])*?)[ \t]*//(?:.*[^\\\n])?$`)
	commentLines = regexp.MustCompile(`(?m)^[ \t]*//(?:.*[^\\\n])?\n`)
)

// code returns a source without comments, and without the carriage returns that git may have added.
func code(text []byte) []byte {
	text = bytes.ReplaceAll(text, []byte("\r"), nil)
	return comment.ReplaceAll(commentLines.ReplaceAll(text, nil), []byte("$1"))
}

// sourceHash returns the SHA-256 of a unit's code, the code of all headers it includes, and the
// compiler's arguments.
func sourceHash(dir, unit string) ([]byte, error) {
	h := sha256.New()
	fmt.Fprintln(h, targets, flags)
	family, file := filepath.Split(unit)
	files := []string{file + ".cu"}
	for i := 0; i < len(files); i++ {
		text, err := read(dir, family, files[i])
		if err != nil {
			return nil, err
		}
		text = code(text)
		fmt.Fprintf(h, "%s %d\n%s", files[i], len(text), text)
		for _, m := range include.FindAllSubmatch(text, -1) {
			if name := string(m[1]); !slices.Contains(files, name) {
				files = append(files, name)
			}
		}
	}

	return h.Sum(nil), nil
}

// binaryHash returns the hash at the end of a unit's binary, or nil without a binary.
func binaryHash(dir, unit string) []byte {
	b, err := os.ReadFile(filepath.Join(dir, unit+".fatbin"))
	if err != nil || len(b) < sha256.Size {
		return nil
	}
	return b[len(b)-sha256.Size:]
}

// compiler returns the path of nvcc, in CUDA_HOME or else in PATH. It must be from CUDA 13.0,
// because drivers of that version reject the PTX of later ones.
func compiler() (string, error) {
	nvcc := "nvcc"
	if home := os.Getenv("CUDA_HOME"); home != "" {
		nvcc = filepath.Join(home, "bin", nvcc)
	}

	out, err := exec.Command(nvcc, "--version").Output()
	if bytes.Contains(out, []byte("release 13.0,")) {
		return nvcc, nil
	}
	if err == nil {
		err = fmt.Errorf("nvcc --version prints %q", out)
	}

	return "", fmt.Errorf("%s is not nvcc from CUDA 13.0 (%w); install that toolkit, or use pip to install "+
		"nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-cccl nvidia-cuda-runtime, each "+
		"==13.0.*, and set CUDA_HOME to site-packages/nvidia/cu13", nvcc, err)
}

// compile writes a unit's binary, followed by its hash.
func compile(dir, unit string, sum []byte) error {
	nvcc, err := compiler()
	if err != nil {
		return err
	}

	family, file := filepath.Split(unit)
	args := append([]string{"-fatbin", "-o", file + ".fatbin", "--threads",
		fmt.Sprint(runtime.NumCPU())}, flags...)
	for _, folder := range headers {
		args = append(args, "-I"+filepath.Join("..", folder))
	}

	for _, t := range strings.Split(targets, ",") {
		args = append(args, "-gencode=arch="+strings.Replace(t, "sm_", "compute_", 1)+",code="+t)
	}

	cmd := exec.Command(nvcc, append(args, file+".cu")...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = filepath.Join(dir, family), os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return err
	}

	binary := filepath.Join(dir, unit+".fatbin")
	image, err := os.ReadFile(binary)
	if err != nil {
		return err
	}

	return os.WriteFile(binary, append(image, sum...), 0o644)
}
