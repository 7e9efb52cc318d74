// What the types of this package need of files that build.sh leaves out, since these bring client-go.
package v1alpha1

type scheme struct{}

func (scheme) Register(...any) {}

var SchemeBuilder scheme

const cpuString, memoryString, workloadString = "cpu", "memory", "workload"
