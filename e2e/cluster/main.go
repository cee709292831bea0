// Command kube is a Kubernetes node, its control plane and kubectl in one binary, for tests on one machine:
//
//	kube apiserver | controller-manager | scheduler | kubelet | proxy | dns | kubectl  [flags of that component]
//
// Under the name kube-apiserver or kubectl, by a link, it is that program.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	_ "time/tzdata"

	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var components = map[string]func() *cobra.Command{
	"apiserver":          apiserver.NewAPIServerCommand,
	"controller-manager": controllermanager.NewControllerManagerCommand,
	"scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":            func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"proxy":              proxy.NewProxyCommand,
}

func main() {
	name, flags := chosen()
	switch component, known := components[name]; {
	case name == "dns":
		os.Args = append([]string{"coredns"}, flags...)
		coremain.Run()
	case name == "kubectl":
		os.Args = append([]string{"kubectl"}, flags...)
		command := kubectl.NewDefaultKubectlCommand()
		if err := cli.RunNoErrOutput(command); err != nil {
			util.CheckErr(err)
		}
	case known:
		os.Args = append([]string{"kube-" + name}, flags...)
		os.Exit(cli.Run(component()))
	default:
		fmt.Fprintln(os.Stderr, "usage: kube apiserver|controller-manager|scheduler|kubelet|proxy|dns|kubectl [flags]")
		os.Exit(2)
	}
}

// chosen is the component's name, from the program's own or else the first argument, and its flags.
func chosen() (string, []string) {
	called := filepath.Base(os.Args[0])
	if called == "kubectl" {
		return called, os.Args[1:]
	}
	if name, found := strings.CutPrefix(called, "kube-"); found {
		return name, os.Args[1:]
	}
	if len(os.Args) < 2 {
		return "", nil
	}
	return os.Args[1], os.Args[2:]
}
