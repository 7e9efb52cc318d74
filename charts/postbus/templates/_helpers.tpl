{{- define "postbus.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- printf "%s-operator" (.Release.Name | trunc 41 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- /* Objects without a namespace: several operators with their own namespaces may be installed. */ -}}
{{- define "postbus.clusterName" -}}
{{- if eq .Values.rbac.scope "namespace" }}{{ .Release.Namespace }}-{{ end }}{{ include "postbus.fullname" . }}
{{- end -}}

{{- define "postbus.selectorLabels" -}}
app.kubernetes.io/name: postbus-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* Labels of every object of the chart. Those of the operator win over commonLabels. */ -}}
{{- define "postbus.labels" -}}
{{- $own := include "postbus.selectorLabels" . | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/version" .Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/part-of" "postbus" -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .Release.Service -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_") -}}
{{- merge $own .Values.commonLabels | toYaml -}}
{{- end -}}

{{- define "postbus.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "postbus.fullname" .) -}}
{{- end -}}

{{- /* An image: registry, repository, and a digest or a tag. Argument: root, image, tag. */ -}}
{{- define "postbus.imageReference" -}}
{{- $registry := .image.registry | default .root.Values.image.registry | default .root.Values.global.imageRegistry -}}
{{- $name := .image.repository -}}
{{- if $registry }}{{ $name = printf "%s/%s" (trimSuffix "/" $registry) $name }}{{ end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name .tag -}}
{{- end -}}
{{- end -}}

{{- define "postbus.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{- include "postbus.imageReference" (dict "root" . "image" .Values.image "tag" $tag) -}}
{{- end -}}

{{- define "postbus.storeImage" -}}
{{- $tag := .Values.storeImage.tag | default .Values.image.tag | default .Chart.AppVersion -}}
{{- include "postbus.imageReference" (dict "root" . "image" .Values.storeImage "tag" $tag) -}}
{{- end -}}

{{- define "postbus.pipelineImage" -}}
{{- $tag := .Values.pipelineImage.tag | default .Values.image.tag | default .Chart.AppVersion -}}
{{- include "postbus.imageReference" (dict "root" . "image" .Values.pipelineImage "tag" $tag) -}}
{{- end -}}

{{- define "postbus.pullSecrets" -}}
{{- with concat .Values.global.imagePullSecrets .Values.image.pullSecrets | uniq -}}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "postbus.testNamespace" -}}
{{- .Values.test.namespace | default (first .Values.watchNamespaces) | default .Release.Namespace -}}
{{- end -}}

{{- /* Rights of the operator in each cluster namespace that it watches. */ -}}
{{- define "postbus.rules" -}}
# Buses and entities: `patch` is for finalizers, `delete` for entities that were idle.
- apiGroups: [postbus.dev]
  resources: [busnamespaces, pipelines]
  verbs: [get, list, watch, patch]
- apiGroups: [postbus.dev]
  resources: [queues, topics, subscriptions]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [postbus.dev]
  resources: [busnamespaces/status, queues/status, topics/status, subscriptions/status, pipelines/status]
  verbs: [patch]
# What buses and pipelines consist of. An apply that creates needs `create` and `patch`; what has no `delete`
# goes with its Namespace or Pipeline.
- apiGroups: [""]
  resources: [configmaps, services]
  verbs: [get, list, watch, create, patch]
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch]
# A pipeline has another Job for another document, and no CronJob without a schedule.
- apiGroups: [batch]
  resources: [jobs, cronjobs]
  verbs: [get, list, watch, create, patch, delete]
# A pipeline with executors: the account of its driver, and the binding to the role of drivers, which is the
# only one that can be bound.
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [{{ eq .Values.rbac.scope "namespace" | ternary "roles" "clusterroles" }}]
  resourceNames: [{{ include "postbus.fullname" . }}-driver]
  verbs: [bind]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, list, watch, create, patch, delete]
# Volumes of managed stores grow, and are deleted when the retention of a deleted bus has passed.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [list, watch, patch, delete]
# The reason why a pod does not start, and the exit code of a pipeline.
- apiGroups: [""]
  resources: [pods]
  verbs: [list]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- if .Values.rbac.certManager }}
- apiGroups: [cert-manager.io]
  resources: [certificates]
  verbs: [get, create, patch]
{{- end }}
{{- end -}}

{{- /* Rights of a pipeline's driver that has executors, in its own cluster namespace. */ -}}
{{- define "postbus.driverRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete, deletecollection]
{{- end -}}

{{- /* The token of the ServiceAccount, as the kubelet would mount it: it expires after an hour. */ -}}
{{- define "postbus.tokenVolume" -}}
- name: token
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap:
          name: kube-root-ca.crt
          items: [{key: ca.crt, path: ca.crt}]
      - downwardAPI:
          items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]
{{- end -}}

{{- /* Settings that follow from other values, then those of `settings`. */ -}}
{{- define "postbus.environment" -}}
- name: POSTBUS_OPERATOR_IMAGE
  value: {{ include "postbus.image" . }}
- name: POSTBUS_OPERATOR_STORE_IMAGE
  value: {{ include "postbus.storeImage" . }}
- name: POSTBUS_OPERATOR_PIPELINE_IMAGE
  value: {{ include "postbus.pipelineImage" . }}
- name: POSTBUS_OPERATOR_DRIVER_ROLE
  value: {{ eq .Values.rbac.scope "namespace" | ternary "Role" "ClusterRole" }}/{{ include "postbus.fullname" . }}-driver
- name: POSTBUS_OPERATOR_IMAGE_PULL_POLICY
  value: {{ .Values.image.pullPolicy }}
- name: POSTBUS_OPERATOR_NAMESPACES
  value: {{ join "," .Values.watchNamespaces | quote }}
- name: POSTBUS_OPERATOR_LEASE_NAME
  value: {{ include "postbus.fullname" . }}
{{- range $name, $value := .Values.settings }}
{{- if not (kindIs "invalid" $value) }}
- name: POSTBUS_OPERATOR_{{ snakecase $name | upper }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Pods that run a program of `files/` once. */ -}}
{{- define "postbus.scriptPod" -}}
{{- include "postbus.pullSecrets" . }}
restartPolicy: Never
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "postbus.scriptContainer" -}}
image: {{ include "postbus.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
resources:
  requests: {cpu: 10m, memory: 64Mi}
  limits: {memory: 256Mi}
securityContext:
  {{- toYaml .Values.securityContext | nindent 2 }}
volumeMounts:
  - {name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
  - {name: scripts, mountPath: /scripts, readOnly: true}
  - {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "postbus.scriptVolumes" -}}
{{ include "postbus.tokenVolume" .root }}
- name: scripts
  configMap: {name: {{ .name }}}
- name: tmp
  emptyDir: {sizeLimit: 16Mi}
{{- end -}}
