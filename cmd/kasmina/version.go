package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

func init() {
	flagRules["version"] = map[string]rule{}
}

// newVersion returns the command that prints the version.
func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Long: `Print the version of kasmina, the commit from which it was built if the build recorded one, and
the version of Go.`,
		Args:              noArguments,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, args []string) error {
			_, err := fmt.Fprintf(c.OutOrStdout(), "kasmina %s %s %s/%s\n", buildVersion(),
				runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return err
		},
	}
}

// buildVersion describes the build of this program.
func buildVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "(unknown)"
	}
	return versionOf(info)
}

// versionOf returns the version of the module. It adds the commit if the build recorded a commit that is
// not part of the version.
func versionOf(info *debug.BuildInfo) string {
	settings := map[string]string{}
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}

	version, commit := info.Main.Version, settings["vcs.revision"]
	if version == "" {
		version = "(devel)"
	}

	if version != "(devel)" || commit == "" {
		return version
	}

	if settings["vcs.modified"] == "true" {
		commit += ", modified"
	}

	return fmt.Sprintf("%s (commit %s)", version, commit)
}
