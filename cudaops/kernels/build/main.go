// Command build compiles the kernels' units with nvcc: those whose binary does not match its sources, or the ones named.
//
//	go run ./build [-all] [-targets sm_90a] [-v] [unit ...]
//
// It must run in the folder of the sources, as go generate does. With -targets it compiles for fewer GPUs, which is quicker
// while writing a kernel; such a binary does not pass for complete.
package main

import (
	"bytes"
	"crypto/sha256"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
)

// allTargets covers Ampere, Ada, Hopper with its own instructions, and Blackwell; PTX of compute_80 runs on whatever else
// is at least an A100.
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

// units lists the .cu files of a folder, without the extension.
func units(dir string) ([]string, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.cu"))
	for i, p := range paths {
		paths[i] = strings.TrimSuffix(filepath.Base(p), ".cu")
	}
	return paths, err
}

var include = regexp.MustCompile(`(?m)^\s*#\s*include\s+"([^"]+)"`)

// sourceHash is the SHA-256 of a unit's source, of all that it includes from the folder, and of how it is compiled.
// Carriage returns do not count, since git may put them there.
func sourceHash(dir, unit, targets string) ([]byte, error) {
	h := sha256.New()
	fmt.Fprintln(h, targets, flags)
	files := []string{unit + ".cu"}
	for i := 0; i < len(files); i++ {
		text, err := os.ReadFile(filepath.Join(dir, files[i]))
		if err != nil {
			return nil, err
		}
		text = bytes.ReplaceAll(text, []byte("\r"), nil)
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

// findCompiler looks for nvcc of CUDA 13.0 in PATH, in CUDA_HOME and in the packages of the python3 in PATH. Drivers of CUDA 13.0 do
// not take the PTX of a later one.
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
	return "", fmt.Errorf("no nvcc of CUDA 13.0 in PATH, CUDA_HOME or the packages of the python3 in PATH%s; install that "+
		"toolkit, or with pip: nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-cccl nvidia-cuda-runtime, each ==13.0.*", others)
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
		found, _ := filepath.Glob(filepath.Join(strings.TrimSpace(string(out)), "nvidia", "cu*", "bin", "nvcc"))
		c = append(c, found...)
	}
	return c
}

// compile writes a unit's binary, and its hash behind it.
func (c compiler) compile(dir, unit, targets string, sum []byte, verbose bool) error {
	out, err := os.CreateTemp("", unit+"-*.fatbin")
	if err != nil {
		return err
	}
	defer os.Remove(out.Name())
	out.Close()
	args := append([]string{"-fatbin", "-o", out.Name(), "--threads", fmt.Sprint(runtime.NumCPU())}, flags...)
	for _, t := range strings.Split(targets, ",") {
		args = append(args, "-gencode=arch="+strings.Replace(t, "sm_", "compute_", 1)+",code="+t)
	}
	if verbose {
		args = append(args, "-Xptxas", "-v")
	}
	cmd := exec.Command(string(c), append(args, unit+".cu")...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return err
	}
	image, err := os.ReadFile(out.Name())
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, unit+".fatbin"), append(image, sum...), 0o644)
}
