{{/* Name of all objects of the release. */}}
{{- define "baton.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{/* Name of the Lease and of the operator's objects. */}}
{{- define "baton.lease" -}}
{{ include "baton.fullname" . }}-operator
{{- end -}}

{{- define "baton.account" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "baton.lease" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{/* Labels that select the operator's pods only. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name }}-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* The port of an HTTP URL. */}}
{{- define "baton.urlPort" -}}
{{- $url := urlParse . -}}
{{- if regexMatch ":[0-9]+$" $url.host -}}
{{ regexFind "[0-9]+$" $url.host }}
{{- else -}}
{{ ternary 443 80 (eq $url.scheme "https") }}
{{- end -}}
{{- end -}}

{{/* Reference of the image with the name .image in the values. */}}
{{- define "baton.image" -}}
{{- $image := index .root.Values.images .image -}}
{{- $name := $image.repository -}}
{{- with .root.Values.images.registry -}}
{{- $name = printf "%s/%s" (trimSuffix "/" .) $name -}}
{{- end -}}
{{- if $image.digest -}}
{{ $name }}@{{ $image.digest }}
{{- else -}}
{{ $name }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}
