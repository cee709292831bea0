{{/* Generated from baton_operator by `make fix`. Do not edit. */}}

{{- define "baton.serviceRules" -}}
# What users ask for.
- apiGroups: [baton.dev]
  resources: [inferenceservices, loraadapters]
  verbs: [get, list, watch]
# To make them is given on to routers; what a router has made is deleted some time after its end.
- apiGroups: [baton.dev]
  resources: [batchjobs]
  verbs: [get, list, watch, create, delete]
# Made once; their numbers are written by whoever scales, who may be the operator.
- apiGroups: [baton.dev]
  resources: [rolescalers]
  verbs: [get, list, watch, create, patch, delete]
# What has become of it.
- apiGroups: [baton.dev]
  resources: [inferenceservices/status, batchjobs/status, loraadapters/status, rolescalers/status]
  verbs: [patch]
# Children that block their owner's deletion, where OwnerReferencesPermissionEnforcement is on.
- apiGroups: [baton.dev]
  resources: [inferenceservices/finalizers]
  verbs: [update]
# Workers and routers.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [list, watch, create, patch, delete]
# Generations, weights, addresses; the heartbeat.
- apiGroups: [""]
  resources: [configmaps, services]
  verbs: [list, watch, create, patch, delete]
# Who reaches whom.
- apiGroups: [networking.k8s.io]
  resources: [ingresses, networkpolicies]
  verbs: [list, watch, create, patch, delete]
# How many may be missing at once.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list, watch, create, patch, delete]
# Accounts of workers, routers and runners of batches.
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [list, watch, create, patch, delete]
# A router's right to see its workers, and to make BatchJobs.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [list, watch, create, patch, delete]
# Given on to routers: nobody can give what he has not.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
# Exposure by the Gateway API.
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [list, watch, create, patch, delete]
# Certificates of an issuer.
- apiGroups: [cert-manager.io]
  resources: [certificates]
  verbs: [list, watch, create, patch, delete]
# Fetching models, running batches.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, watch, create]
# Batches that rest, go on, or have ended; models' Jobs end by themselves.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, patch, delete]
# Models' files, which are never deleted.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [list, create]
# How workers and routers are.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# Which of several workers is to go: their deletion cost.
- apiGroups: [""]
  resources: [pods]
  verbs: [patch]
# What has happened to a service.
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{- define "baton.ownRules" -}}
# One operator at a time.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
# One operator at a time.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "baton.lease" . }}]
  verbs: [get, update]
{{- end -}}

{{- define "baton.viewRules" -}}
# Who may view a namespace.
- apiGroups: [baton.dev]
  resources: [inferenceservices, rolescalers, batchjobs, loraadapters]
  verbs: [get, list, watch]
{{- end -}}

{{- define "baton.editRules" -}}
# Who may edit one.
- apiGroups: [baton.dev]
  resources: [inferenceservices, rolescalers, batchjobs, loraadapters]
  verbs: [create, delete, deletecollection, patch, update]
# kubectl scale.
- apiGroups: [baton.dev]
  resources: [rolescalers/scale]
  verbs: [get, patch, update]
{{- end -}}
