// Command foreign-types decodes manifests for operators of others with the Go types of those operators.
//
// It reads YAML documents on standard input and prints the kind and name of each. A field that a type
// does not have, in its exact spelling, and a key that is there twice end it with code 1.
package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"

	certmanager "github.com/cert-manager/cert-manager/pkg/apis/certmanager/v1"
	helm "github.com/fluxcd/helm-controller/api/v2"
	kustomize "github.com/fluxcd/kustomize-controller/api/v1"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	documents "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	cnpg "postbus.dev/tests/foreign-types/cnpg"
	keda "postbus.dev/tests/foreign-types/keda"
)

var types = map[metav1.TypeMeta]func() any{
	{APIVersion: "cert-manager.io/v1", Kind: "Certificate"}:               func() any { return new(certmanager.Certificate) },
	{APIVersion: "cert-manager.io/v1", Kind: "Issuer"}:                    func() any { return new(certmanager.Issuer) },
	{APIVersion: "helm.toolkit.fluxcd.io/v2", Kind: "HelmRelease"}:        func() any { return new(helm.HelmRelease) },
	{APIVersion: "keda.sh/v1alpha1", Kind: "ScaledObject"}:                func() any { return new(keda.ScaledObject) },
	{APIVersion: "keda.sh/v1alpha1", Kind: "TriggerAuthentication"}:       func() any { return new(keda.TriggerAuthentication) },
	{APIVersion: "kustomize.toolkit.fluxcd.io/v1", Kind: "Kustomization"}: func() any { return new(kustomize.Kustomization) },
	{APIVersion: "monitoring.coreos.com/v1", Kind: "PodMonitor"}:          func() any { return new(monitoring.PodMonitor) },
	{APIVersion: "monitoring.coreos.com/v1", Kind: "PrometheusRule"}:      func() any { return new(monitoring.PrometheusRule) },
	{APIVersion: "monitoring.coreos.com/v1", Kind: "ServiceMonitor"}:      func() any { return new(monitoring.ServiceMonitor) },
	{APIVersion: "postgresql.cnpg.io/v1", Kind: "Cluster"}:                func() any { return new(cnpg.Cluster) },
}

func main() {
	reader := documents.NewYAMLReader(bufio.NewReader(os.Stdin))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return
		}
		if err == nil {
			err = decode(document)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

func decode(document []byte) error {
	text, err := yaml.YAMLToJSONStrict(document)
	if err != nil {
		return err
	}
	var named metav1.PartialObjectMetadata
	if err := json.UnmarshalCaseSensitivePreserveInts(text, &named); err != nil {
		return err
	}
	made, known := types[named.TypeMeta]
	if !known {
		return fmt.Errorf("no type for %s %s", named.APIVersion, named.Kind)
	}
	unknown, err := json.UnmarshalStrict(text, made())
	if err := errors.Join(append(unknown, err)...); err != nil {
		return fmt.Errorf("%s %s: %w", named.Kind, named.Name, err)
	}
	fmt.Println(named.Kind, named.Name)
	return nil
}
