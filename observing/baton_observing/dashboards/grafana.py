"""
Convert dashboards to Grafana's JSON, with Grafana's own SDK.

The variable `datasource` selects the Prometheus. A panel's description ends with its unit and its runbook.
"""

from __future__ import annotations

import json
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

from baton_observing.alerts.alert import runbook
from baton_observing.dashboards.panels import Dashboard, Panel, Query, Variable

TAG = "baton"
"""Every dashboard has this tag and links to the others that have it."""

HEIGHT = 8
STAT_HEIGHT = 5
DATA_SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
ALL_VALUES = dashboard.VariableOption(selected=True, text="All", value="$__all")


def to_json(source: Dashboard) -> str:
    """Return the JSON of a dashboard."""
    built = _dashboard(source).build()
    for number, panel in enumerate(built.panels or (), start=1):
        panel.id_val = number  # stable while no panel is added before it
    for variable in (built.templating.list_val or ()) if built.templating else ():
        variable.auto = variable.auto_min = variable.auto_count = None  # fields of interval variables only
    document = json.loads(JSONEncoder().encode(built))
    annotations = document.get("annotations", {}).get("list", ())
    for fields, annotation in zip(annotations, source.annotations, strict=True):
        # Fields of the Prometheus data source, which the SDK does not have.
        fields.update(titleFormat=annotation.name, textFormat=annotation.text)
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _dashboard(source: Dashboard) -> builders.Dashboard:
    builder = (
        builders.Dashboard(source.title)
        .uid(f"baton-{source.name}")
        .description(source.description)
        .tags([TAG])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone(common.TimeZoneBrowser)
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(
            builders.DashboardLink("Baton")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in source.variables:
        builder = builder.with_variable(_variable(variable))
    for annotation in source.annotations:
        builder = builder.annotation(
            builders.AnnotationQuery()
            .name(annotation.name)
            .datasource(DATA_SOURCE)
            .enable(True)
            .icon_color("blue")
            .expr(annotation.expression)
        )
    for row in source.rows:
        builder = builder.with_row(builders.Row(row.title))
        for panel in row.panels:
            builder = builder.with_panel(_panel(panel))
    return builder


def _variable(variable: Variable) -> builders.QueryVariable:
    return (
        builders.QueryVariable(variable.name)
        .label(variable.label)
        .datasource(DATA_SOURCE)
        .query(variable.query)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(ALL_VALUES)
    )


def _panel(panel: Panel) -> timeseries.Panel | stat.Panel | statetimeline.Panel:
    builder: timeseries.Panel | stat.Panel | statetimeline.Panel
    if panel.kind == "stat":
        builder = _stat()
    elif panel.kind == "timeline":
        builder = _timeline(panel)
    else:
        builder = _timeseries(panel)
    builder = (
        builder.title(panel.title)
        .description(_description(panel))
        .unit(panel.unit.grafana)
        .datasource(DATA_SOURCE)
        .span(panel.width)
        .targets(
            [_query(letter, query) for letter, query in zip(ascii_uppercase, panel.queries, strict=False)]
        )
        .thresholds(_thresholds(panel.threshold))
    )
    return builder


def _description(panel: Panel) -> str:
    text = f"{panel.description}\n\nUnit: {panel.unit.name}."
    # Plain text: Grafana would resolve a link to a path against its own address.
    return f"{text}\n\nRunbook: {runbook(panel.runbook)}" if panel.runbook else text


def _stat() -> stat.Panel:
    return (
        stat.Panel()
        .height(STAT_HEIGHT)
        .graph_mode(common.BigValueGraphMode.AREA)
        .color_mode(common.BigValueColorMode.VALUE)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def _timeline(panel: Panel) -> statetimeline.Panel:
    options = {
        str(state.value): dashboard.ValueMappingResult(text=state.text, color=state.color, index=number)
        for number, state in enumerate(panel.states)
    }
    return (
        statetimeline.Panel()
        .height(HEIGHT)
        .mappings([dashboard.ValueMap(options=options)])
        .merge_values(True)
        .show_value(common.VisibilityMode.AUTO)
        .row_height(0.8)
        .fill_opacity(70)
        .legend(common_builders.VizLegendOptions().show_legend(False))
    )


def _timeseries(panel: Panel) -> timeseries.Panel:
    builder = (
        timeseries.Panel()
        .height(HEIGHT)
        .min(0)
        .fill_opacity(30 if panel.kind == "stacked" else 5)
        .show_points(common.VisibilityMode.NEVER)
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(
            common_builders.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
    )
    if panel.kind == "stacked":
        builder = builder.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
    if panel.threshold is not None:
        style = common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        builder = builder.thresholds_style(style)
    return builder


def _query(letter: str, query: Query) -> prometheus.Dataquery:
    builder = prometheus.Dataquery().ref_id(letter).expr(query.expression).range()
    return builder.legend_format(query.legend) if query.legend else builder


def _thresholds(threshold: float | None) -> builders.ThresholdsConfig:
    steps = [dashboard.Threshold(value=None, color="green")]
    if threshold is not None:
        steps.append(dashboard.Threshold(value=threshold, color="red"))
    return builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)
