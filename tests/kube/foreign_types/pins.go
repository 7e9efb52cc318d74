//go:build pins

package main

// Modules whose files build.sh compiles as packages of this module, for go.mod and go.sum.
import (
	_ "github.com/cloudnative-pg/cloudnative-pg/api/v1"
	_ "github.com/kedacore/keda/v2/apis/keda/v1alpha1"
)
