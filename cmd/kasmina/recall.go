package main

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"
)

// excluding lists pairs of options that end a run. If one option of a pair is given, the other is not
// recalled.
var excluding = map[string]string{"steps": "time", "time": "steps"}

// recall sets, with --resume, the options that are missing on the command line to their values at the
// start of the run in --out. Without --resume it returns an error if the folder holds a run and the
// command line does not describe one.
func recall(c *cobra.Command) error {
	f := c.Flags()
	resume, err := f.GetBool("resume")
	if err != nil {
		return err
	}

	out, err := f.GetString("out")
	if err != nil || out == "" {
		return err
	}

	m, err := runDir{filepath.Clean(out)}.readManifest()
	switch {
	case !resume && m != nil && !f.Changed("data"):
		return fmt.Errorf("%s holds a run: add --resume to continue it with the options that it started "+
			"with, or give --data to start a new run in another folder", out)
	case !resume:
		return nil
	case err == nil && m == nil && !f.Changed("data") && !exists(runDir{filepath.Clean(out)}.in(checkpointName)):
		return fmt.Errorf("--resume: there is no run in %s to continue", out)
	case err != nil || m == nil:
		return err // decide handles a missing manifest
	}

	var onCommandLine []string
	names := slices.Sorted(maps.Keys(m.Options))
	for _, name := range names {
		if flag := f.Lookup(name); flag != nil && flag.Changed {
			onCommandLine = append(onCommandLine, name)
		}
	}

	for _, name := range names {
		flag, value := f.Lookup(name), m.Options[name]
		if flag == nil || slices.Contains(onCommandLine, name) ||
			slices.Contains(onCommandLine, excluding[name]) || value == flag.DefValue {
			continue
		}
		if err := f.Set(name, value); err != nil {
			return fmt.Errorf("--resume: --%s was %q when the run started: %w", name, value, err)
		}
	}

	return nil
}

// openSettings are the default values that leave a choice to the command. Older versions recorded these
// values instead of the choice.
var openSettings = map[string]string{"device": "auto", "precision": "", "seq": "0", "lr": "0"}

// settle replaces default values that leave a choice to the command by the choice. A run then also
// continues if the user spells out the same value. The flags share these variables, so the manifest
// records the choice.
func (o *trainOptions) settle(m machines) {
	o.settleDevice(m)
	if o.model == "" {
		return
	}

	if f, err := openFolder(o.model); err == nil { // runFrom reports the error
		if o.seq == 0 {
			o.seq = min(f.Config.Seq, 1024)
		}
		f.Close()
	}
}

// settleDevice is the part of settle that concerns the device and its precision.
func (o *trainOptions) settleDevice(m machines) {
	o.device = "cpu"
	if m.device != nil {
		o.device = "cuda"
	}

	if o.precision == "" {
		o.precision = m.precision.String()
	}
}
