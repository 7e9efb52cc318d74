package sdk

import (
	"os"
	"os/exec"
	"testing"
)

func TestFirstStepsOfThePageRunAsTheyStand(t *testing.T) {
	said, err := exec.CommandContext(within(t, 3*long), os.Getenv("POSTBUS_FIRST_STEPS")).CombinedOutput()
	equal(t, string(said), "hello\n")
	ok(t, err)
}
