"""`hpcdist report`: the page of a made-up run, in a real browser, light and dark; and its pictures."""

import json
import os
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from scale import SCALE

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
#: It looks for updates otherwise, and asks for a sandbox that containers lack.
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--window-size=1000,1400"),
]
DARK = "--blink-settings=preferredColorScheme=0"


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def record_rank(folder, attempt, rank, first, last, began, own_s):
    """Write the records of a rank whose steps take a second, of which it computes `own_s`."""
    header = {"rank": rank, "role": f"worker:{rank}", "host": f"n{rank // 2 + 1}", "process_began": began - 5.0}
    header["step"] = first
    windows = []
    for step in range(first, last, 10):
        windows.append(
            {
                "window": [float(step), step + 10.0],
                "steps": [step + 1, step + 10],
                "n_steps": 10,
                "step_s": 10.0,
                "input_s": 0.5,
                "communication_s": 9.5 - 10 * own_s,
                "save_s": 0.2,
                "between_s": 0.3,
                "longest": [step + 3, 1.5],
                "rows": 640,
                "stale": [0, 0],
            }
        )
    path = folder / "trace" / f"{attempt:04d}" / f"rank-{rank:05d}.jsonl"
    write(path, {**header, "clock": [float(first), began]}, *windows)


@pytest.fixture
def run_dir(tmp_path):
    """Return the folder of a run of four ranks: 40 steps, a kill, and 60 more; rank 3 is slow in the second attempt."""
    folder = tmp_path / "run <b>&amp;"
    for attempt, first, last, began in ((1, 0, 40, 1000.0), (2, 30, 100, 1100.0)):
        for rank in range(4):
            if attempt == 2 and rank == 3:
                seconds = 0.9
            else:
                seconds = 0.5
            record_rank(folder, attempt, rank, first, last, began, seconds)
        commit = {"event": "commit", "step": last - 10, "nbytes": 3_000_000, "took_s": 0.25, "time_s": began + 30}
        begin = {"event": "begin", "time_s": began - 1, "job": "17", "nodes": ["n1", "n2"]}
        if attempt == 2:
            resume = [{"event": "resume", "step": 30, "time_s": began}]
        else:
            resume = []
        if attempt == 2:
            end = [{"event": "end", "how": "finished", "reason": "done <i>", "time_s": began + 70}]
        else:
            end = []
        write(folder / "checkpoints" / "attempts" / f"{attempt:04d}.jsonl", begin, *resume, commit, *end)
    write(folder / "metrics.jsonl", *({"step": step, "loss <x>": 100 / step} for step in range(5, 100, 5)))
    settings = {"roles": {"value": "worker:4", "from": "HPCDIST_ROLES"}}
    config = {
        "attempt": 2,
        "program": ["python", "train.py"],
        "hosts": {"n1": "0-1", "n2": "2-3"},
        "settings": settings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Page(HTMLParser):
    """What a page refers to, its texts, and its tags."""

    def __init__(self, text):
        super().__init__()
        self.references = []
        self.tags = []
        self.texts = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [value for name, value in attributes if name in ("src", "href", "xlink:href", "data")]

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.feature("observability.goodput")
def test_the_page_tells_the_run(run_dir, hpcdist):
    code, out, _ = hpcdist("report", run_dir)
    assert (code, out) == (0, f"{run_dir}/report/report.html, and 5 pictures beside it\n")
    text = (run_dir / "report" / "report.html").read_text()
    page = Page(text)
    page_text = " ".join(" ".join(page.texts).split())
    for expected in (
        "2 attempts",
        "100 last step",
        "64 rows a second",
        "rank 3 on n2 computes 900 ms a step, the median 500 ms",
        "10 steps were lost and repeated",
        "90 2 3 MB 250 ms",  # step, attempt, size and time of a checkpoint
        "step 30 finished: done <i>",
        "died by a signal or an error",
        "roles worker:4 HPCDIST_ROLES",
    ):
        assert expected in page_text, expected
    assert not {"i", "x", "b", "script", "link", "img"} & set(page.tags) - {"b"}, "names are texts, and not tags"
    assert [reference for reference in page.references if not reference.startswith("#")] == [], "it needs no other file"
    drawn = text[text.index("<svg") :]
    assert "var(--series-1)" in drawn
    assert not re.search(r"(fill|stroke): #", drawn), "each colour is one of the page's, for light and dark"
    assert not re.search(r"https?://(?!www\.w3\.org|purl\.org|creativecommons\.org|matplotlib\.org)", text)


@pytest.mark.parametrize(
    ("is_over", "text"),
    [
        (False, "evaluator-0 has failed 3 times in a row: a full disk"),
        (True, "evaluator-0 works again, after 3 failures"),
    ],
)
def test_errors_beside_training_are_on_the_page_and_in_status(run_dir, hpcdist, is_over, text):
    (run_dir / "errors").mkdir()
    error = {"error": "a full disk", "n_failures": 3, "time_s": 1.0, "is_over": is_over}
    (run_dir / "errors" / "evaluator-0.json").write_text(json.dumps(error))
    assert hpcdist("report", run_dir)[0] == 0
    page = Page((run_dir / "report" / "report.html").read_text())
    assert text in " ".join(" ".join(page.texts).split())
    assert f"beside it   {text}" in hpcdist("status", run_dir)[1]


def test_pictures_are_beside_it(run_dir, hpcdist, tmp_path):
    hpcdist("report", run_dir, "--out", tmp_path / "out")
    names = sorted(os.listdir(tmp_path / "out"))
    assert names == [
        "goodput.png",
        "metric-1-loss--x--step.png",
        "metric-1-loss--x--time.png",
        *("pace.png", "ranks.png", "report.html"),
    ]
    for name in names[:-1]:
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG"), name
    assert not (run_dir / "report").exists()


def test_a_run_that_has_just_begun(tmp_path, hpcdist):
    write(tmp_path / "checkpoints" / "attempts" / "0001.jsonl", {"event": "begin", "time_s": 10.0, "nodes": ["n1"]})
    assert hpcdist("report", tmp_path)[0] == 0
    assert "The job has written no decision yet" in (tmp_path / "report" / "report.html").read_text()


def test_an_attempt_that_starts_hides_nothing(run_dir, hpcdist):
    """Its ledger has a beginning alone: the numbers are those of the attempt before, and nothing is lost to it."""
    begin = {"event": "begin", "time_s": 1300.0, "job": None, "nodes": ["n1"]}
    write(run_dir / "checkpoints" / "attempts" / "0003.jsonl", begin)
    assert hpcdist("report", run_dir)[0] == 0
    page_text = " ".join(" ".join(Page((run_dir / "report" / "report.html").read_text()).texts).split())
    for expected in (
        "3 attempts",
        "100 last step",
        "rank 3 on n2 computes",
        "10 steps were lost",
        "nothing was restored",
    ):
        assert expected in page_text, expected
    assert page_text.count("runs, or died by a signal or an error") == 1


def test_steps_that_a_damaged_file_does_not_name(run_dir, hpcdist):
    for path in (run_dir / "trace" / "0002").glob("rank-*"):
        header, *windows = map(json.loads, path.read_text().splitlines())
        write(path, header, *({**window, "steps": None} for window in windows))
    assert hpcdist("report", run_dir)[0] == 0


@pytest.mark.parametrize("name", ["0003.old", "0003.jsonl", "x", "\u0663"])
def test_other_folders_beside_the_records(run_dir, hpcdist, name):
    shutil.copytree(run_dir / "trace" / "0002", run_dir / "trace" / name)
    assert hpcdist("report", run_dir)[0] == 0


def test_staleness_of_parameter_servers(tmp_path, hpcdist):
    for rank in range(2):
        record_rank(tmp_path, 1, rank, 0, 20, 1000.0, 0.5)
        path = tmp_path / "trace" / "0001" / f"rank-{rank:05d}.jsonl"
        path.write_text(path.read_text().replace('"stale": [0, 0]', f'"stale": [{12 + rank}, 3]'))
    assert hpcdist("report", tmp_path)[0] == 0
    page_text = " ".join(Page((tmp_path / "report" / "report.html").read_text()).texts)
    assert "Staleness is how many pushes of other workers a push had not seen." in page_text
    assert "1.20" in page_text
    assert "1.30" in page_text


def test_many_ranks(tmp_path, hpcdist):
    """Those with the longest own part are shown, the slow one among them."""
    for rank in range(40):
        if rank == 37:
            seconds = 0.9
        else:
            seconds = 0.5
        record_rank(tmp_path, 1, rank, 0, 20, 1000.0, seconds)
    assert hpcdist("report", tmp_path)[0] == 0
    text = " ".join(Page((tmp_path / "report" / "report.html").read_text()).texts)
    assert "Of 40 ranks the 32 with the longest own part." in text
    assert "rank 37" in text


VALUES = [None, True, -1, 0, 3, 1e300, float("nan"), 10**400, [], [1], [3, 1], {}, {"a": []}]
TEXTS = ["", "$\\frac$", "\ud800", "x" * 300]


def changed(value, draws):
    """Return a value of JSON with one part of it, by chance, replaced, or a name."""
    if isinstance(value, dict) and value and draws.random() < 0.9:
        name = draws.choice(list(value))
        new = draws.choice(TEXTS) if draws.random() < 0.1 else name
        return {**{key: old for key, old in value.items() if key != name}, new: changed(value[name], draws)}
    if isinstance(value, list) and value and draws.random() < 0.7:
        place = draws.randrange(len(value))
        return [changed(old, draws) if number == place else old for number, old in enumerate(value)]
    return draws.choice(VALUES + TEXTS)


@pytest.mark.timeout(300)
def test_whatever_a_run_folder_holds(run_dir, hpcdist, monkeypatch):
    """A few values of its files replaced by others: a page, a trace and a state, or one line; no traceback."""
    from hpcdist.cli import charts

    monkeypatch.setattr(charts.Chart, "save", lambda chart, folder: None)
    files = [path for path in run_dir.rglob("*") if path.suffix in (".jsonl", ".json")]
    texts = {path: path.read_text() for path in files}
    for number in range(400 if SCALE.is_full else 25):
        draws = random.Random(number)
        for path in draws.sample(files, 3):
            lines = texts[path].splitlines()
            for _ in range(3):
                place = draws.randrange(len(lines))
                lines[place] = json.dumps(changed(json.loads(lines[place]), draws))
            path.write_text("\n".join(lines) + "\n")
        for command in ("report", "trace", "status"):
            code, _, error = hpcdist(command, run_dir)
            assert (code, error) == (0, "") or (code in (2, 74, 78) and error.count("\n") == 1), (
                number,
                command,
                error,
            )
        json.loads((run_dir / "trace.json").read_text(), parse_constant=pytest.fail)
        for path, text in texts.items():
            path.write_text(text)


@pytest.mark.parametrize("name", [r"$\frac$", "\ud800", "a/b", "x" * 300, "損失"])
def test_names_of_metrics(run_dir, hpcdist, name):
    write(
        run_dir / "metrics.jsonl", *({"step": step, name: 1e300 if step == 40 else step} for step in range(5, 100, 5))
    )
    code, out, _ = hpcdist("report", run_dir)
    assert (code, "and 5 pictures" in out) == (0, True)
    assert len(list((run_dir / "report").glob("metric-1-*.png"))) == 2


def test_without_matplotlib(run_dir, hpcdist, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "hpcdist.cli.charts", None)
    code, _, error = hpcdist("report", run_dir)
    assert (code, error.count("\n")) == (78, 1)
    assert "pip install 'hpcdist[report]'" in error


def shot(page, path, *options):
    """Return what a browser shows of a page, as an array of pixels; and what it says on its console."""
    import matplotlib.image

    folder = path.with_suffix(".profile")
    command = [
        BROWSER,
        *OPTIONS,
        "--enable-logging=stderr",
        f"--user-data-dir={folder}",
        f"--screenshot={path}",
        *options,
    ]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=60)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return matplotlib.image.imread(path)[..., :3], console


@pytest.mark.skipif(BROWSER is None and not os.environ.get("CI"), reason="no chromium is installed")
def test_a_browser_shows_it_light_and_dark(run_dir, hpcdist, tmp_path):
    """Texts stand out from the ground in both, series keep their colours apart, and nothing is missing."""
    hpcdist("report", run_dir)
    page = run_dir / "report" / "report.html"
    shown = {}
    for name, options in {"light": (), "dark": (DARK,)}.items():
        pixels, console = shot(page, tmp_path / f"{name}.png", *options)
        assert console == []
        shown[name] = pixels
        assert pixels.shape[:2] == (1400, 1000)
    corners = {name: float(pixels[5, 5].mean()) for name, pixels in shown.items()}
    assert corners["light"] > 0.9
    assert corners["dark"] < 0.15
    for name, pixels in shown.items():
        heading = pixels[20:60, 60:400].mean(axis=2)
        contrast = abs(heading - corners[name]).max()
        assert contrast > 0.7, name
        blue = (pixels[..., 2] - pixels[..., 0] > 0.3) & (pixels[..., 2] > 0.5)
        green = (pixels[..., 1] - pixels[..., 0] > 0.3) & (pixels[..., 1] > 0.5)
        assert blue.sum() > 3000, f"{name}: lines and the first part of the bars"
        assert green.sum() > 200, f"{name}: the second part of the bars"
    assert np.abs(shown["light"] - shown["dark"]).mean() > 0.5


def test_tables_of_fit_are_drawn_too(run_dir, hpcdist):
    (run_dir / "log.csv").write_text("epoch,loss\n0,2.5\n1,1.5\n")
    assert hpcdist("report", run_dir)[0] == 0
    page = (run_dir / "report" / "report.html").read_text()
    assert "Tables and events" in page
    assert "loss of log.csv" in page
    assert (run_dir / "report" / "curve-1-loss.png").exists()
