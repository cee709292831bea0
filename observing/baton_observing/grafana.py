"""
Dashboards as Grafana reads them, built by its own SDK, so that there is no field that it does not know.

Data comes from whichever Prometheus is chosen at the top. Panels name the runbook that tells more.
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
from baton_observing.panels import Board, Panel, Query, Variable

TAG = "baton"
"""All dashboards have it, and link to all that have it."""

HEIGHT = 8
NUMBER_HEIGHT = 5
SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
EVERYTHING = dashboard.VariableOption(selected=True, text="All", value="$__all")


def text(board: Board) -> str:
    """The JSON of a dashboard."""
    built = _board(board).build()
    for number, panel in enumerate(built.panels or (), start=1):
        panel.id_val = number  # links to one panel stay right as long as none comes before it
    for variable in (built.templating.list_val or ()) if built.templating else ():
        variable.auto = variable.auto_min = variable.auto_count = None  # of intervals only
    made = json.loads(JSONEncoder().encode(built))
    for given, annotation in zip(made.get("annotations", {}).get("list", ()), board.annotations, strict=True):
        # Of the Prometheus data source; the SDK knows only what all of them have.
        given |= {"titleFormat": annotation.name, "textFormat": annotation.text}
    return json.dumps(made, indent=1, sort_keys=True) + "\n"


def _board(board: Board) -> builders.Dashboard:
    made = (
        builders.Dashboard(board.title)
        .uid(f"baton-{board.name}")
        .description(board.about)
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
    for variable in board.variables:
        made = made.with_variable(_variable(variable))
    for annotation in board.annotations:
        made = made.annotation(
            builders.AnnotationQuery()
            .name(annotation.name)
            .datasource(SOURCE)
            .enable(True)
            .icon_color("blue")
            .expr(annotation.expression)
        )
    for row in board.rows:
        made = made.with_row(builders.Row(row.title))
        for panel in row.panels:
            made = made.with_panel(_panel(panel))
    return made


def _variable(variable: Variable) -> builders.QueryVariable:
    return (
        builders.QueryVariable(variable.name)
        .label(variable.label)
        .datasource(SOURCE)
        .query(variable.query)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(EVERYTHING)
    )


def _panel(panel: Panel) -> timeseries.Panel | stat.Panel | statetimeline.Panel:
    made: timeseries.Panel | stat.Panel | statetimeline.Panel
    if panel.kind == "number":
        made = _number(panel)
    else:
        made = _states(panel) if panel.kind == "states" else _lines(panel)
    made = (
        made.title(panel.title)
        .description(_description(panel))
        .unit(panel.unit)
        .datasource(SOURCE)
        .span(panel.width)
        .targets(
            [_query(letter, query) for letter, query in zip(ascii_uppercase, panel.queries, strict=False)]
        )
        .thresholds(_thresholds(panel.limit))
    )
    return made


def _description(panel: Panel) -> str:
    # No link: Grafana would take a path for one of its own.
    return f"{panel.meaning}\n\nRunbook: {runbook(panel.runbook)}" if panel.runbook else panel.meaning


def _number(panel: Panel) -> stat.Panel:
    return (
        stat.Panel()
        .height(NUMBER_HEIGHT)
        .graph_mode(common.BigValueGraphMode.AREA)
        .color_mode(common.BigValueColorMode.VALUE)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def _states(panel: Panel) -> statetimeline.Panel:
    options = {
        str(one.value): dashboard.ValueMappingResult(text=one.text, color=one.color, index=number)
        for number, one in enumerate(panel.states)
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


def _lines(panel: Panel) -> timeseries.Panel:
    made = (
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
        made = made.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
    if panel.limit is not None:
        style = common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        made = made.thresholds_style(style)
    return made


def _query(letter: str, query: Query) -> prometheus.Dataquery:
    made = prometheus.Dataquery().ref_id(letter).expr(query.expression).range()
    return made.legend_format(query.legend) if query.legend else made


def _thresholds(limit: float | None) -> builders.ThresholdsConfig:
    steps = [dashboard.Threshold(value=None, color="green")]
    if limit is not None:
        steps.append(dashboard.Threshold(value=limit, color="red"))
    return builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)
