package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/hf/gguf"
	"github.com/kasmina-go/kasmina/llm/serve"
)

// adapterFlag adds --adapter for a command that uses a model with at most one adapter.
func (o *common) adapterFlag(c *cobra.Command) {
	c.Flags().StringArrayVar(&o.adapters, "adapter", nil, "`directory` of adapters for the model, in the format of PEFT")
}

// adapterFlags adds --adapter for a command that uses a model with any number of adapters.
func (o *common) adapterFlags(c *cobra.Command) {
	c.Flags().StringArrayVar(&o.adapters, "adapter", nil,
		"`directory` of adapters for the model, in the format of PEFT; can be given several times")
}

// An openedModel is a model's folder with adapters for it.
type openedModel struct {
	*hf.Folder
	dirs     []string // of the adapters
	adapters []*llm.Adapter
	adapted  bool // --model is a folder of adapters
	alone    bool // all texts use the adapter, if there is one
}

// merges reports whether the adapter must be made part of the model, because it changes layers for which texts
// cannot choose an adapter.
func (m *openedModel) merges() bool {
	return m.alone && len(m.adapters) == 1 && m.adapters[0].ChangesOuterLayers()
}

// seeded reports whether all texts use an adapter that has chunk seeds.
func (m *openedModel) seeded() bool {
	return m.alone && len(m.adapters) == 1 && len(m.adapters[0].Seeds) > 0
}

// openFolder opens a model's folder, or a GGUF file.
func openFolder(path string) (*hf.Folder, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, missingModel(path, err)
	}
	if err == nil && info.IsDir() && isUnfinished(path) {
		return nil, fmt.Errorf("the run in %s has not finished, so it has no model yet: to finish it, repeat the command "+
			"that started it", path)
	}
	if err != nil || !info.Mode().IsRegular() {
		return hf.Open(path)
	}
	if !gguf.Is(path) {
		return nil, fmt.Errorf("%s is neither a folder nor a GGUF file: name the folder with config.json, or a GGUF file",
			path)
	}
	return gguf.Open(path)
}

// isUnfinished reports whether a folder holds a run and nothing that the run has saved for other commands.
func isUnfinished(dir string) bool {
	return exists(runDir{dir}.in(manifestName)) && !exists(filepath.Join(dir, "config.json")) && !hf.IsAdapter(dir)
}

// hubName matches the names of models on Hugging Face's hub.
var hubName = regexp.MustCompile(`^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$`)

// missingModel returns the error for the path of a model that does not exist.
func missingModel(path string, err error) error {
	err = fmt.Errorf("--model: %w: name a folder with config.json, or a GGUF file", err)
	// In a folder that exists, the name is more likely to be mistyped.
	if hubName.MatchString(path) && !exists(filepath.Dir(path)) {
		err = fmt.Errorf("%w. Models are not downloaded; for one of Hugging Face's hub, first run "+
			"hf download %s --local-dir %s, and name that folder", err, path, filepath.Base(path))
	}
	return err
}

// checkNames returns an error if two adapters would have the same name as models, or the name of the model itself.
func (m *openedModel) checkNames() error {
	if m.adapted {
		return nil
	}
	names := []string{m.Name()}
	for _, path := range m.dirs {
		dir, err := filepath.Abs(path)
		if err != nil {
			return fmt.Errorf("--adapter: %w", err)
		}
		name := filepath.Base(dir)
		if slices.Contains(names, name) {
			return fmt.Errorf("--adapter: %s would be another model with the name %s, which comes from the folder: "+
				"rename the folder", path, name)
		}
		names = append(names, name)
	}
	return nil
}

// openModel opens --model and reads the adapters. If --model is a folder of adapters, openModel opens the model
// that the adapters were made for.
func (o *common) openModel(ctx context.Context) (m *openedModel, err error) {
	m = &openedModel{dirs: o.adapters}
	model := o.model
	if hf.IsAdapter(model) {
		if len(m.dirs) > 0 {
			return nil, fmt.Errorf("--model: %s holds adapters: give their model, and each folder of adapters "+
				"with --adapter", model)
		}
		m.dirs, m.adapted, m.alone = []string{model}, true, true
		if model, err = baseOf(model); err != nil {
			return nil, err
		}
	}

	if m.Folder, err = openFolder(model); err != nil {
		return nil, err
	}
	for _, dir := range m.dirs {
		if err := checkAdapter(dir); err != nil {
			return nil, errors.Join(fmt.Errorf("--adapter: %w", err), m.Close())
		}
		a, err := hf.ReadAdapter(ctx, dir, m.Folder)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("--adapter: %w", err), m.Close())
		}
		m.adapters = append(m.adapters, a)
	}

	return m, nil
}

// checkAdapter returns an error unless a folder holds adapters.
func checkAdapter(dir string) error {
	if _, err := os.Stat(dir); err != nil {
		return err
	}
	switch {
	case hf.IsAdapter(dir):
		return nil
	case exists(filepath.Join(dir, "config.json")):
		return fmt.Errorf("%s holds a whole model: name it with --model", dir)
	}
	return fmt.Errorf("%s has no adapter_config.json: name a folder that kasmina finetune or PEFT has written", dir)
}

// openOne is openModel for a command that uses at most one adapter.
func (o *common) openOne(ctx context.Context) (*openedModel, error) {
	if n := len(o.adapters); n > 1 {
		return nil, fmt.Errorf("--adapter is given %d times, want once: kasmina serve can use several", n)
	}
	m, err := o.openModel(ctx)
	if err == nil {
		m.alone = true
	}
	return m, err
}

// baseOf returns the folder of the model that adapters were made for.
func baseOf(dir string) (string, error) {
	base, err := hf.AdapterBase(dir)
	if err != nil {
		return "", err
	}
	if base == "" {
		return "", fmt.Errorf("%s holds adapters and does not name their model: write its folder as "+
			"base_model_name_or_path into adapter_config.json", dir)
	}

	// Besides the working directory, a relative path may start at the adapters.
	for _, path := range []string{base, filepath.Join(dir, base)} {
		if info, err := os.Stat(path); err == nil && (info.IsDir() || info.Mode().IsRegular()) {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s holds adapters of the model %s, which is not a folder here: download it, or name its "+
		"folder with --model and the adapters with --adapter", dir, base)
}

// adapter returns the only adapter, or nil.
func (m *openedModel) adapter() *llm.Adapter {
	if len(m.adapters) == 0 {
		return nil
	}
	return m.adapters[0]
}

// texts returns the folder with the tokenizer and the chat template, for a model with at most one adapter.
func (m *openedModel) texts() *hf.Folder {
	if len(m.dirs) == 0 {
		return m.Folder
	}
	return m.WithTexts(m.dirs[0])
}

// served describes the model, with its only adapter if it has one.
func (m *openedModel) served(g serve.Generator, context int) (*serve.Model, error) {
	if len(m.dirs) == 0 {
		return serve.NewModel(m.Folder, g, context)
	}
	return serve.NewAdaptedModel(m.Folder, m.dirs[0], g, context)
}
