{{/* Generated from baton_operator by `make fix`. Do not edit. */}}

{{- define "baton.serviceRules" -}}
# What users ask for.
- apiGroups: [baton.dev]
  resources: [inferenceservices]
  verbs: [list, watch]
# What users ask for.
- apiGroups: [baton.dev]
  resources: [loraadapters]
  verbs: [list, watch]
# Routers may create BatchJobs, so the operator must hold that right to grant it. It deletes those that a router created some time after they end.
- apiGroups: [baton.dev]
  resources: [batchjobs]
  verbs: [list, watch, create, delete]
# Created once. An autoscaler writes the numbers: the operator's own, or another.
- apiGroups: [baton.dev]
  resources: [rolescalers]
  verbs: [list, watch, create, patch, delete]
# Workers and routers.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [list, watch, create, patch, delete]
# Fetching models, running batches. Jobs of batches are suspended, resumed and deleted.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, watch, create, patch, delete]
# Exposure by an Ingress.
- apiGroups: [networking.k8s.io]
  resources: [ingresses]
  verbs: [list, watch, create, patch, delete]
# Which pods reach workers and routers.
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [list, watch, create, patch, delete]
# How many pods may be missing at once.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list, watch, create, patch, delete]
# A router's rights to see its workers and to create BatchJobs.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles]
  verbs: [list, watch, create, patch, delete]
# Binds a router's Role.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [list, watch, create, patch, delete]
# Generations and weights of services.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [list, watch, create, patch, delete]
# Models' files. A claim is never deleted; it grows with the size that the spec asks for.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [list, watch, create, patch]
# State of workers and routers. A deletion cost is written before a role shrinks.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
# Addresses of routers and workers.
- apiGroups: [""]
  resources: [services]
  verbs: [list, watch, create, patch, delete]
# Accounts of workers, routers and runners of batches.
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [list, watch, create, patch, delete]
# Exposure by the Gateway API.
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [list, watch, create, patch, delete]
# Certificates of an issuer.
- apiGroups: [cert-manager.io]
  resources: [certificates]
  verbs: [list, watch, create, patch, delete]
# The URL of a service with an HTTPRoute follows the Gateway's listener.
- apiGroups: [gateway.networking.k8s.io]
  resources: [gateways]
  verbs: [list, watch]
# What has become of it.
- apiGroups: [baton.dev]
  resources: [inferenceservices/status, loraadapters/status, batchjobs/status, rolescalers/status]
  verbs: [patch]
# Children that block their owner's deletion, where OwnerReferencesPermissionEnforcement is on.
- apiGroups: [baton.dev]
  resources: [inferenceservices/finalizers]
  verbs: [update]
# Granted to routers: Kubernetes lets nobody grant a right that they lack.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
# One Secret for each service, by which routers sign tickets. The operator can read none.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
# What has happened to a service.
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{- define "baton.clusterRules" -}}
# Whether another operator looks after the same services.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [list]
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
