{{/* Generated from baton_operator by `make fix`. Do not edit. */}}

{{- define "baton.serviceRules" -}}
# Custom resources that users write.
- apiGroups: [baton.dev]
  resources: [inferenceservices]
  verbs: [list, watch]
# Custom resources that users write. The operator adds a finalizer, so that pods unload an adapter before its object disappears.
- apiGroups: [baton.dev]
  resources: [loraadapters]
  verbs: [list, watch, patch]
# Routers may create BatchJobs, so the operator needs that permission to grant it. It deletes BatchJobs of routers some time after they end.
- apiGroups: [baton.dev]
  resources: [batchjobs]
  verbs: [list, watch, create, delete]
# Created once per scaled role. An autoscaler writes their replicas.
- apiGroups: [baton.dev]
  resources: [rolescalers]
  verbs: [list, watch, create, patch, delete]
# Workers and routers.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [list, watch, create, patch, delete]
# Fetch models and run batches. The operator suspends, resumes and deletes Jobs of batches.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, watch, create, patch, delete]
# Expose services by an Ingress.
- apiGroups: [networking.k8s.io]
  resources: [ingresses]
  verbs: [list, watch, create, patch, delete]
# Limit which pods reach workers and routers.
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [list, watch, create, patch, delete]
# Limit how many pods an eviction may take at once.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list, watch, create, patch, delete]
# Let routers list their workers and create BatchJobs.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles]
  verbs: [list, watch, create, patch, delete]
# Bind the Roles of routers.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [list, watch, create, patch, delete]
# Store revisions and weights of services.
- apiGroups: ['']
  resources: [configmaps]
  verbs: [list, watch, create, patch, delete]
# Hold model files. The operator never deletes a claim; it grows a claim to the size in the spec.
- apiGroups: ['']
  resources: [persistentvolumeclaims]
  verbs: [list, watch, create, patch]
# State of workers and routers. The operator sets a deletion cost before a role shrinks.
- apiGroups: ['']
  resources: [pods]
  verbs: [list, watch, patch]
# Addresses of routers and workers.
- apiGroups: ['']
  resources: [services]
  verbs: [list, watch, create, patch, delete]
# Accounts of workers, routers and batch runners.
- apiGroups: ['']
  resources: [serviceaccounts]
  verbs: [list, watch, create, patch, delete]
# Expose services by the Gateway API.
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [list, watch, create, patch, delete]
# Let gateways ask routers for workers.
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [list, watch, create, patch, delete]
# Workers of several nodes.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [list, watch, create, patch, delete]
# Request certificates from an issuer.
- apiGroups: [cert-manager.io]
  resources: [certificates]
  verbs: [list, watch, create, patch, delete]
# The URL of a service with an HTTPRoute follows the Gateway's listener.
- apiGroups: [gateway.networking.k8s.io]
  resources: [gateways]
  verbs: [list, watch]
# Status of the custom resources.
- apiGroups: [baton.dev]
  resources: [inferenceservices/status, loraadapters/status, batchjobs/status, rolescalers/status]
  verbs: [patch]
# Set blockOwnerDeletion in owner references where OwnerReferencesPermissionEnforcement is enabled.
- apiGroups: [baton.dev]
  resources: [inferenceservices/finalizers]
  verbs: [update]
# Granted to routers: Kubernetes requires that the operator has what it grants.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
# One Secret per service, which signs tickets. The operator cannot read Secrets.
- apiGroups: ['']
  resources: [secrets]
  verbs: [create]
# Report transitions of services.
- apiGroups: ['']
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{- define "baton.clusterRules" -}}
# Detect another operator that manages the same services.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [list]
{{- end -}}

{{- define "baton.ownRules" -}}
# Elect the active operator.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
# Elect the active operator.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, update]
  resourceNames: ['{{ include "baton.lease" . }}']
{{- end -}}

{{- define "baton.viewRules" -}}
# Users who may view a namespace.
- apiGroups: [baton.dev]
  resources: [inferenceservices, rolescalers, batchjobs, loraadapters]
  verbs: [get, list, watch]
{{- end -}}

{{- define "baton.editRules" -}}
# Users who may edit a namespace.
- apiGroups: [baton.dev]
  resources: [inferenceservices, rolescalers, batchjobs, loraadapters]
  verbs: [create, delete, deletecollection, patch, update]
# Use kubectl scale.
- apiGroups: [baton.dev]
  resources: [rolescalers/scale]
  verbs: [get, patch, update]
{{- end -}}
