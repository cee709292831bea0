// A dashboard of ours, in Grafana's own types: what has no place in them is an error.

import { AnnotationQuery, Dashboard, Panel, RowPanel } from '@grafana/schema/dist/esm/raw/dashboard/x/dashboard_types.gen';
import * as timeseries from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
import * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import * as statetimeline from '@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen';
import { PrometheusDataQuery } from '@grafana/schema/dist/esm/raw/composable/prometheus/dataquery/x/PrometheusDataQuery_types.gen';

type FieldConfigOf<Custom> = Omit<NonNullable<Panel['fieldConfig']>, 'defaults'> & {
  defaults: Omit<NonNullable<Panel['fieldConfig']>['defaults'], 'custom'> & { custom?: Custom };
};
type PanelOf<Type, Options, Custom> = Omit<Panel, 'type' | 'options' | 'fieldConfig' | 'targets'> & {
  type: Type;
  options?: Options;
  fieldConfig?: FieldConfigOf<Custom>;
  targets: PrometheusDataQuery[];
};
type TimeSeries = PanelOf<'timeseries', timeseries.Options, timeseries.FieldConfig>;
type Stat = PanelOf<'stat', Partial<stat.Options>, Record<string, never>>;
type StateTimeline = PanelOf<'state-timeline', Partial<statetimeline.Options>, statetimeline.FieldConfig>;
// Of the Prometheus data source, whose own fields Grafana publishes no type of.
type Annotation = AnnotationQuery & { expr: string; titleFormat: string; textFormat: string };
export type Checked = Omit<Dashboard, 'panels' | 'annotations'> & {
  annotations?: { list?: Annotation[] };
  panels: Array<TimeSeries | Stat | StateTimeline | RowPanel>;
};
