"""Cost against throughput in words, as a picture of text and as SVG."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

from heterps_compile.plan_facts import PlanFacts, Stage
from heterps_compile.report.frontier_svg import HEIGHT, WIDTH, frontier_html, frontier_svg
from heterps_compile.report.frontier_text import frontier_text

NAMESPACE = {"svg": "http://www.w3.org/2000/svg"}


def point(floor: float | None, reached: float, cost: float, units: int) -> PlanFacts:
    return PlanFacts(
        placement={"emb": "cpu"},
        stages=(Stage(resource="cpu", layers=("emb",), replicas=units),),
        provision={"cpu": units, "a<b": 1},
        min_throughput=floor,
        throughput_samples_per_s=reached,
        price_usd_per_h=0.5 * units,
        cost_usd_per_million_samples=cost,
        optimum_proven=True,
    )


PLANS = (point(None, 1e4, 0.02, 1), point(2e4, 5e4, 0.03, 2), point(1e5, 2e5, 0.5, 90))
END = replace(PLANS[-1], feasible=False, min_throughput=2.02e5, binds=("limit of cpu (90)",))


def test_words_and_table() -> None:
    lines = frontier_text(PLANS, END, asked=3e4).splitlines()
    assert lines[:3] == [
        "Cheapest per sample: 1 cpu and 1 a<b for $0.50/h, 10,000 samples/s, $0.02 per million. Fastest: 90 cpu and 1",
        "a<b for $45.00/h, 200,000 samples/s, $0.50 per million. That is 20 x the speed; per sample 25.0 x.",
        "",
    ]
    assert lines[3:8] == [
        "     floor  samples/s    $/h  $/million  stages  rent",
        "       any     10,000   0.50       0.02       1  1 cpu, 1 a<b",
        "@   20,000     50,000   1.00       0.03       1  2 cpu, 1 a<b",
        "   100,000    200,000  45.00       0.50       1  90 cpu, 1 a<b",
        "@ serves the 30,000 samples/s asked for",
    ]
    assert lines[-1] == "No plan is faster than 200,000 samples/s. In the way: limit of cpu (90)."
    assert max(map(len, lines)) <= 110


def test_the_picture_marks_every_point_and_the_one_asked_for() -> None:
    lines = frontier_text(PLANS, END, asked=3e4).splitlines()
    picture = lines[lines.index("USD per million samples (log scale)") : -2]
    assert sum(line.count("*") for line in picture) == 2
    assert sum(line.count("@") for line in picture) == 1
    assert picture[-1].strip() == "throughput reached, samples/s (log scale)"
    assert max(map(len, picture)) <= 100
    unmarked = frontier_text(PLANS, END)
    assert "@" not in unmarked


def test_points_without_proof_are_counted_and_one_point_needs_no_picture() -> None:
    unsure = replace(PLANS[1], optimum_proven=False)
    assert "1 of 2 points are not proven to be the cheapest" in frontier_text((PLANS[0], unsure), END)
    alone = frontier_text(PLANS[:1], None)
    assert "USD per million samples" not in alone
    assert "Fastest" not in alone


def texts(root: ElementTree.Element) -> list[str]:
    return [node.text or "" for node in root.iterfind(".//svg:text", NAMESPACE)]


def test_the_svg_is_well_formed_with_labelled_axes_and_every_point() -> None:
    root = ElementTree.fromstring(frontier_svg(PLANS, END, asked=3e4))
    said = texts(root)
    assert "throughput reached, samples/s (log scale)" in said
    assert "USD per million samples (log scale)" in said
    assert "No plan is faster than 200,000 samples/s. In the way: limit of cpu (90)." in said
    assert "asked: 30,000" in said
    assert {"10 k", "100 k", "$0.02", "$0.50"} <= set(said)
    circles = root.findall(".//svg:circle", NAMESPACE)
    assert len(circles) == len(PLANS)
    assert circles[0].find("svg:title", NAMESPACE).text.startswith("1 cpu and 1 a<b: $0.50/h, 10,000 samples/s")
    across = [float(circle.get("cx")) for circle in circles]
    up = [float(circle.get("cy")) for circle in circles]
    assert across == sorted(across)
    assert up == sorted(up, reverse=True)
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in zip(across, up, strict=True))


def test_without_an_end_there_is_no_dashed_line() -> None:
    assert "stroke-dasharray" in frontier_svg(PLANS, END)
    assert "stroke-dasharray" not in frontier_svg(PLANS, None)


def test_the_page_holds_picture_and_table() -> None:
    page = frontier_html(PLANS, END)
    assert page.startswith("<!DOCTYPE html>")
    ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert re.search(r"<pre>\nCheapest per sample: 1 cpu and 1 a&lt;b for", page)
    assert "<circle" in page
