// Command build compiles the kernels' units with nvcc: those whose binary does not match its
// sources, or the ones named, as attention/attention_mma.
//
//	go run ./build [-all] [-targets sm_90a] [-v] [family/unit ...]
//
// It must run in the folder above the families', as go generate does. A unit finds headers in its
// own folder, in hopper and in include. With -targets it compiles for fewer GPUs, which is quicker
// while writing a kernel; such a binary does not pass for complete.
package main

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
)

// allTargets covers Ampere, Ada, Hopper with its own instructions, and Blackwell; PTX of compute_80
// runs on whatever else is at least an A100.
const allTargets = "sm_80,sm_89,sm_90a,sm_100,compute_80"

var flags = []string{"-std=c++17", "-O3", "--compress-mode=size"}

func main() {
	log.SetFlags(0)
	all := flag.Bool("all", false, "compile every unit, changed or not")
	targets := flag.String("targets", allTargets, "what to compile for")
	verbose := flag.Bool("v", false, "show the registers and memory that each kernel uses")
	flag.Parse()
	if err := build(".", flag.Args(), *targets, *all, *verbose); err != nil {
		log.Fatal(err)
	}
}

func build(dir string, names []string, targets string, all, verbose bool) error {
	named := len(names) > 0
	if !named {
		var err error
		if names, err = units(dir); err != nil {
			return err
		}
	}
	var nvcc compiler
	for _, name := range names {
		sum, err := sourceHash(dir, name, targets)
		if err != nil {
			return err
		}
		if !all && !named && bytes.Equal(binaryHash(dir, name), sum) {
			continue
		}
		if nvcc == "" {
			if nvcc, err = findCompiler(); err != nil {
				return err
			}
		}
		log.Printf("%s for %s", name, targets)
		if err := nvcc.compile(dir, name, targets, sum, verbose); err != nil {
			return fmt.Errorf("%s.cu: %w", name, err)
		}
	}
	return nil
}

// units lists the .cu files of the families' folders, without the extension.
func units(dir string) ([]string, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*", "*.cu"))
	for i, p := range paths {
		family, file := filepath.Split(p)
		paths[i] = filepath.Join(filepath.Base(family), strings.TrimSuffix(file, ".cu"))
	}
	return paths, err
}

// headers are the folders of headers that several families include.
var headers = []string{"hopper", "include"}

// read reads a source of a family, from its folder or one of the headers'.
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
	// Strings may hold what begins a comment, and a comment's last backslash joins the next line.
	comment      = regexp.MustCompile(`(?m)^((?:"[^"\n]*"|[^"\n])*?)[ \t]*//(?:.*[^\\\n])?$`)
	commentLines = regexp.MustCompile(`(?m)^[ \t]*//(?:.*[^\\\n])?\n`)
)

// code is a source without what does not matter: comments, and carriage returns, which git may put
// there.
func code(text []byte) []byte {
	text = bytes.ReplaceAll(text, []byte("\r"), nil)
	return comment.ReplaceAll(commentLines.ReplaceAll(text, nil), []byte("$1"))
}

// sourceHash is the SHA-256 of a unit's code, of that of all headers that it includes, and of how
// it is compiled.
func sourceHash(dir, unit, targets string) ([]byte, error) {
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

// binaryHash is the hash that a unit's binary ends in, or nil when there is no binary.
func binaryHash(dir, unit string) []byte {
	b, err := os.ReadFile(filepath.Join(dir, unit+".fatbin"))
	if err != nil || len(b) < sha256.Size {
		return nil
	}
	return b[len(b)-sha256.Size:]
}

// compiler is the path of an nvcc.
type compiler string

// findCompiler looks for nvcc of CUDA 13.0 in PATH, in CUDA_HOME and in the packages of the python3
// in PATH. Drivers of CUDA 13.0 do not take the PTX of a later one.
func findCompiler() (compiler, error) {
	var others string
	for _, path := range candidates() {
		out, err := exec.Command(path, "--version").Output()
		if err != nil {
			continue
		}
		release := regexp.MustCompile(`release (\d+\.\d+)`).FindSubmatch(out)
		if release != nil && string(release[1]) == "13.0" {
			return compiler(path), nil
		}
		if release != nil {
			others += fmt.Sprintf("; %s is of CUDA %s", path, release[1])
		}
	}
	return "",
		fmt.Errorf("no nvcc of CUDA 13.0 in PATH, CUDA_HOME or the packages of the python3 in "+
			"PATH%s; install that toolkit, or with pip: nvidia-cuda-nvcc nvidia-nvvm "+
			"nvidia-cuda-crt nvidia-cuda-cccl nvidia-cuda-runtime, each ==13.0.*", others)
}

func candidates() []string {
	var c []string
	if path, err := exec.LookPath("nvcc"); err == nil {
		c = append(c, path)
	}
	if home := os.Getenv("CUDA_HOME"); home != "" {
		c = append(c, filepath.Join(home, "bin", "nvcc"))
	}
	const where = "import sysconfig; print(sysconfig.get_path('purelib'))"
	if out, err := exec.Command("python3", "-c", where).Output(); err == nil {
		found, _ := filepath.Glob(filepath.Join(strings.TrimSpace(string(out)), "nvidia",
			"cu*", "bin", "nvcc"))
		c = append(c, found...)
	}
	return c
}

// compile writes a unit's binary, and its hash behind it.
func (c compiler) compile(dir, unit, targets string, sum []byte, verbose bool) error {
	family, file := filepath.Split(unit)
	out, err := os.CreateTemp("", file+"-*.fatbin")
	if err != nil {
		return err
	}
	defer os.Remove(out.Name())
	out.Close()
	args := append([]string{"-fatbin", "-o", out.Name(), "--threads", fmt.Sprint(runtime.NumCPU())},
		flags...)
	for _, folder := range headers {
		args = append(args, "-I"+filepath.Join("..", folder))
	}
	for _, t := range strings.Split(targets, ",") {
		args = append(args, "-gencode=arch="+strings.Replace(t, "sm_", "compute_", 1)+",code="+t)
	}
	if verbose {
		args = append(args, "-Xptxas", "-v")
	}
	cmd := exec.Command(string(c), append(args, file+".cu")...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = filepath.Join(dir, family), os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return err
	}
	image, err := os.ReadFile(out.Name())
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, unit+".fatbin"), append(image, sum...), 0o644)
}
