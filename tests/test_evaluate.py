"""Reports: each score two ways, what changes none, what is refused."""

import io
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from problems import random_measures, rich_transformer
from rich.console import Console
from scipy.optimize import linprog
from scipy.spatial import cKDTree
from scipy.special import logsumexp

from measureflow import sphere
from measureflow.baselines import baseline_measures
from measureflow.datasets import storms
from measureflow.evaluate import METRICS, Report, evaluate, mean_of
from measureflow.flow import push_forward
from measureflow.measures import MeasurePairs, TokenMeasure

KM = sphere.EARTH_RADIUS_KM


def stay(source: TokenMeasure) -> TokenMeasure:
    return source


def onto(pairs: MeasurePairs):
    """The map that carries each source atom to its own target."""
    rows = pairs.coupling.clamp(min=0).unsqueeze(-1).expand_as(pairs.source.points)
    return lambda source: source.with_points(pairs.target.points.gather(1, rows))


def coupled(*, pairs: int = 4, n: int = 6, d: int = 3, seed: int = 0) -> MeasurePairs:
    """Sources of unequal weights whose targets are their atoms in another order, moved."""
    source = random_measures(pairs, n=n, d=d, seed=seed)
    moved = random_measures(pairs, n=n, d=d, seed=seed + 1).points
    order = torch.stack([torch.randperm(n, generator=torch.Generator().manual_seed(i)) for i in range(pairs)])
    place = order.argsort(-1)  # source row i goes to the row where it stands in `order`
    target = TokenMeasure(moved, source.weights.gather(1, order))
    return MeasurePairs(source, target, [f"p{i}" for i in range(pairs)], place)


def angles(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.arccos(np.clip(x @ y.T, -1, 1))


def by_linear_programme(mu: TokenMeasure, nu: TokenMeasure, p: int) -> float:
    n, m = mu.weights.shape[-1], nu.weights.shape[-1]
    cost = angles(mu.points.numpy(), nu.points.numpy()) ** p
    sums = np.vstack([np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))])
    solved = linprog(cost.ravel(), A_eq=sums, b_eq=np.concatenate([mu.weights, nu.weights]))
    return solved.fun ** (1 / p)


def by_permutations(mu: TokenMeasure, nu: TokenMeasure, p: int) -> float:
    cost = angles(mu.points.numpy(), nu.points.numpy()) ** p
    rows = range(len(cost))
    return min(sum(cost[i, o[i]] for i in rows) / len(cost) for o in itertools.permutations(rows)) ** (1 / p)


def test_a_perfect_map_has_no_error_at_all():
    for pairs in (coupled(), storms(years=[2000, 2020])):
        report = evaluate(onto(pairs), pairs)
        for metric in ("w2", "w1", "mean_error", "max_error"):
            assert report.scores[metric].abs().max() == 0, metric
        assert report.scores["sinkhorn"].abs().max() < 1e-12  # sums in another order


@pytest.mark.parametrize(("metric", "p"), [("w2", 2), ("w1", 1)])
def test_distances_agree_with_a_linear_programme_and_with_all_permutations(metric, p):
    pairs = coupled()
    report = evaluate(stay, pairs)
    for i in range(len(pairs)):
        # 1e-7: what the simplex of scipy leaves of its constraints, under a root.
        assert float(report.scores[metric][i]) == pytest.approx(
            by_linear_programme(pairs.source[i], pairs.target[i], p), abs=1e-7
        )
    equal = MeasurePairs(TokenMeasure(pairs.source.points), TokenMeasure(pairs.target.points))
    report = evaluate(stay, equal)
    for i in range(len(equal)):
        # acos of the reference is off by 1e-8 at most here.
        assert float(report.scores[metric][i]) == pytest.approx(
            by_permutations(equal.source[i], equal.target[i], p), abs=1e-8
        )


def entropic_cost(x: np.ndarray, a: np.ndarray, y: np.ndarray, b: np.ndarray, eps: float) -> float:
    """<P, d²/2> + eps KL(P | ab') at the optimum: Sinkhorn in the log domain, slowly annealed."""
    cost = angles(x, y) ** 2 / 2
    f = np.zeros(len(a))
    for now in np.geomspace(5, eps, 1500):
        g = -now * logsumexp((f[:, None] - cost) / now, b=a[:, None], axis=0)
        f = -now * logsumexp((g[None] - cost) / now, b=b[None], axis=1)
    return float(a @ f + b @ g)  # the dual, where the plan's mass is 1


def test_sinkhorn_divergence_agrees_with_one_iterated_to_the_end():
    pairs = coupled(pairs=1)
    x, a = pairs.source.points[0].numpy(), pairs.source.weights[0].numpy()
    y, b = pairs.target.points[0].numpy(), pairs.target.weights[0].numpy()
    crossed = entropic_cost(x, a, y, b, 0.05**2)
    own = (entropic_cost(x, a, x, a, 0.05**2) + entropic_cost(y, b, y, b, 0.05**2)) / 2
    # 1e-5 is the report's stated error, twice; the annealing here leaves less than 1e-4.
    assert float(evaluate(stay, pairs).scores["sinkhorn"]) == pytest.approx(crossed - own, abs=1e-4)


def test_errors_follow_the_coupling_atom_by_atom():
    pairs = coupled()
    report = evaluate(stay, pairs)
    for i, pair in enumerate(pairs):
        x, y, a = pair.source.points[0].numpy(), pair.target.points[0].numpy(), pair.source.weights[0].numpy()
        error = np.array([angles(x[r : r + 1], y[int(c) : int(c) + 1])[0, 0] for r, c in enumerate(pair.coupling[0])])
        assert float(report.scores["mean_error"][i]) == pytest.approx(float(a @ error), abs=1e-12)
        assert float(report.scores["max_error"][i]) == pytest.approx(float(error.max()), abs=1e-12)
    assert bool((report.scores["w1"] <= report.scores["mean_error"] + 1e-12).all())


def test_a_transformer_and_its_push_forward_are_the_same_map():
    pairs, theta = coupled(), rich_transformer(3, seed=0)
    first = evaluate(theta, pairs)
    second = evaluate(lambda source: push_forward(theta, source), pairs)
    assert first.to_dict() == second.to_dict()


def test_padding_changes_nothing():
    pairs, theta = coupled(), rich_transformer(3, seed=0)

    def padded(mu: TokenMeasure, rows: int) -> TokenMeasure:
        points = torch.nn.functional.pad(mu.points, (0, 0, 0, rows), value=math.nan)
        return TokenMeasure(points, torch.nn.functional.pad(mu.weights, (0, rows)))

    coupling = torch.nn.functional.pad(pairs.coupling, (0, 3), value=-1)
    wide = MeasurePairs(padded(pairs.source, 3), padded(pairs.target, 2), pairs.names, coupling)
    first, second = evaluate(theta, pairs), evaluate(theta, wide)
    # Random draws too: padding draws nothing. 1e-9: the adaptive solver judges the padded batch as another one.
    for metric in first.scores:
        for name, values in first.methods(metric).items():
            torch.testing.assert_close(second.methods(metric)[name], values, rtol=0, atol=1e-9)


def test_the_order_of_atoms_changes_no_score_that_is_not_drawn():
    pairs, theta = coupled(), rich_transformer(3, seed=0)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    source = TokenMeasure(pairs.source.points[:, order], pairs.source.weights[:, order])
    target = TokenMeasure(pairs.target.points[:, order.flip(0)], pairs.target.weights[:, order.flip(0)])
    place = order.flip(0).argsort()
    other = MeasurePairs(source, target, pairs.names, place[pairs.coupling[:, order]])
    first, second = evaluate(theta, pairs), evaluate(theta, other)
    for metric in first.scores:
        for name in ("map", "identity", "mean target", "nearest"):
            # 1e-9: the adaptive solver sees sums in another order.
            torch.testing.assert_close(
                second.methods(metric)[name], first.methods(metric)[name], rtol=0, atol=1e-9, msg=f"{metric}, {name}"
            )


def test_a_rotation_changes_no_score():
    pairs = coupled()
    Q = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))).Q
    turned = MeasurePairs(
        pairs.source.with_points(pairs.source.points @ Q.mT),
        pairs.target.with_points(pairs.target.points @ Q.mT),
        pairs.names,
        pairs.coupling,
    )
    first, second = evaluate(stay, pairs), evaluate(stay, turned)
    for metric in first.scores:
        for name, values in first.methods(metric).items():
            torch.testing.assert_close(second.methods(metric)[name], values, rtol=0, atol=1e-9)


def test_nearest_leaves_the_pair_itself_out_and_agrees_with_a_tree():
    pairs = storms(years=[2001, 2002, 2003])
    report = evaluate(stay, pairs)
    for i in range(3):
        others = [j for j in range(3) if j != i]
        real = pairs.source.weights[others] > 0
        born = pairs.source.points[others][real].numpy()
        went = pairs.target.points[others].gather(
            1, pairs.coupling[others].clamp(min=0).unsqueeze(-1).expand(-1, -1, 3)
        )[real]
        _, row = cKDTree(born).query(pairs[i].source[0].atoms().numpy())
        moved = TokenMeasure(went[torch.from_numpy(row)])
        expected = float(evaluate(stay, MeasurePairs(_batch(moved), _batch(pairs[i].target[0]))).w2)
        assert float(report.baselines["nearest"]["w2"][i]) == pytest.approx(expected, abs=1e-12)
    # A pair that may look at itself finds its own storms: every atom is born nearest to itself.
    assert float(evaluate(stay, pairs, train=pairs).baselines["nearest"]["w2"].max()) == 0


def _batch(mu: TokenMeasure) -> TokenMeasure:
    real = mu.weights > 0
    return TokenMeasure(mu.points[real].unsqueeze(0))


def test_mean_target_is_the_projected_mean_of_the_other_targets():
    pairs = coupled()
    report = evaluate(stay, pairs)
    for i in range(4):
        others = [j for j in range(4) if j != i]
        centre = sphere.project(pairs.target.barycentre[others].mean(0))
        spread = angles(pairs.target.points[i].numpy(), centre.numpy()[None])[:, 0]
        # To one point there is one plan.
        expected = float(pairs.target.weights[i].numpy() @ spread**2) ** 0.5
        assert float(report.baselines["mean target"]["w2"][i]) == pytest.approx(expected, abs=1e-9)


def test_climatology_draws_from_the_right_atoms_in_proportion_to_their_weights():
    # Targets of two atoms of weights 0.8 and 0.2, and a third of weight 0; coordinate i tells pair i.
    n = 20_000
    eye = torch.eye(3, dtype=torch.float64)
    atoms = torch.stack([torch.stack([eye[i], -eye[i], eye[0]]) for i in range(3)])
    weights = torch.tensor([0.8, 0.2, 0.0], dtype=torch.float64).expand(3, 3)
    source = TokenMeasure(eye[:1].expand(3, n, 3))
    pairs = MeasurePairs(source, TokenMeasure(atoms, weights))
    rules, _ = baseline_measures(pairs, None, neighbours=1, generator=torch.Generator().manual_seed(0))
    drawn = rules["climatology"].points
    for i in range(3):
        for j in range(3):
            for sign, share in ((1, 0.4), (-1, 0.1)):
                seen = float(((drawn[i] * sign)[:, j] > 0.5).double().mean())
                # Four standard deviations of a share of 20,000 draws.
                assert seen == pytest.approx(0.0 if i == j else share, abs=4 * math.sqrt(0.25 / n))
                assert i != j or seen == 0


def test_same_seed_same_report():
    pairs = coupled()
    assert evaluate(stay, pairs, seed=3).to_dict() == evaluate(stay, pairs, seed=3).to_dict()
    first, second = evaluate(stay, pairs, seed=3), evaluate(stay, pairs, seed=4)
    assert not torch.equal(first.noise, second.noise)
    assert not torch.equal(first.baselines["climatology"]["w2"], second.baselines["climatology"]["w2"])
    torch.testing.assert_close(first.w2, second.w2, rtol=0, atol=0)


def test_noise_of_two_atoms_is_their_distance_and_of_one_atom_unknown():
    points = torch.eye(3, dtype=torch.float64)
    target = TokenMeasure.from_ragged([points[:2], points[:1]])
    report = evaluate(stay, MeasurePairs(target, target))
    assert float(report.noise[0]) == pytest.approx(math.pi / 2, abs=1e-12)
    assert math.isnan(float(report.noise[1]))
    assert mean_of(report.noise) == pytest.approx(math.pi / 2, abs=1e-12)
    assert report.to_dict()["noise"] == {
        "mean": pytest.approx(math.pi / 2),
        "interval": None,
        "per_pair": [pytest.approx(math.pi / 2), None],
    }


def test_intervals_cover_the_mean_as_often_as_they_say():
    generator = torch.Generator().manual_seed(0)
    pairs, trials, hits = 40, 200, 0
    report = evaluate(stay, coupled(pairs=2))
    for _ in range(trials):
        low, high = report.interval(torch.randn(pairs, generator=generator, dtype=torch.float64))
        hits += low < 0 < high
    # The percentile bootstrap of 40 values covers some 94 %; four standard deviations of 200 trials below that.
    assert hits / trials > 0.94 - 4 * math.sqrt(0.94 * 0.06 / trials)
    values = torch.randn(pairs, generator=generator, dtype=torch.float64)
    low, high = report.interval(values)
    normal = 2 * 1.96 * float(values.std()) / math.sqrt(pairs)
    assert high - low == pytest.approx(normal, rel=0.15)  # 1,000 resamples: 5 % at the ends, twice, and n - 1 for n


def test_one_pair_and_no_train_leaves_only_identity_and_says_so():
    pairs = coupled(pairs=1)
    report = evaluate(stay, pairs)
    assert list(report.baselines) == ["identity"]
    assert report.interval(report.w2) is None
    assert "mean target, climatology, nearest: left out" in str(report)
    assert set(evaluate(stay, pairs, train=coupled(seed=9)).baselines) > {"climatology", "nearest"}


def test_without_a_coupling_there_are_no_errors_and_no_nearest_and_the_report_says_so():
    pairs = replace(coupled(), coupling=None)
    report = evaluate(stay, pairs)
    assert "mean_error" not in report.scores
    assert "nearest" not in report.baselines
    assert "nearest: left out" in str(report)
    assert "mean and max error: left out" in str(report)


def test_targets_without_a_mean_direction_leave_that_baseline_out():
    points = torch.tensor([[1.0, 0, 0], [-1, 0, 0]], dtype=torch.float64).expand(2, 2, 3)
    report = evaluate(stay, MeasurePairs(mu := TokenMeasure(points), mu, ["a", "b"]))
    assert "mean target" not in report.baselines
    assert "mean target: left out, for pair 'a'" in str(report)


def test_km_are_radians_times_the_radius():
    pairs = storms(years=[2020, 2021])
    report = evaluate(stay, pairs)
    assert report.unit("w2") == ("km", 6371.0)
    assert f"{mean_of(report.w2) * 6371:.0f}" in str(report)
    flat = MeasurePairs(
        replace(pairs.source, globe=False), replace(pairs.target, globe=False), pairs.names, pairs.coupling
    )
    other = evaluate(stay, flat)
    assert other.unit("w2") == ("rad", 1.0)
    assert torch.equal(other.w2, report.w2)
    assert other.to_dict()["km_per_rad"] is None


def test_float32_is_judged_in_its_own_precision():
    pairs = coupled()
    single = evaluate(stay, pairs.to(torch.float32), train=pairs)
    for metric, values in evaluate(stay, pairs, train=pairs).scores.items():
        # A few roundings of float32; Sinkhorn's are divided by ε.
        torch.testing.assert_close(single.scores[metric], values, rtol=0, atol=1e-4 if metric == "sinkhorn" else 1e-6)


def test_json_comes_back(tmp_path):
    report = evaluate(stay, replace(coupled(), names=["é", "[b]", "\"q'", "\n"[:0] + "x"]))
    report.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == report.to_dict()
    values = report.to_dict()["map"]["w2"]
    assert values["per_pair"] == report.w2.tolist()
    assert values["mean"] == mean_of(report.w2)
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_p26_the_report_states_formula_and_unit_of_every_metric():
    report = evaluate(stay, coupled())
    assert set(report.scores) == set(METRICS)
    assert [report.unit(name)[0] for name in METRICS] == ["rad", "rad", "rad²", "rad", "rad"]
    for name, metric in METRICS.items():
        assert metric.formula in str(report)
        assert f"{metric.label} ({report.unit(name)[0]}) = " in str(report)
    assert report.to_dict()["formulas"] == {name: metric.formula for name, metric in METRICS.items()}


def test_p46_names_are_shown_as_they_are():
    names = ["pair[/b]", "[a].csv", "[red]x", "$a_b$"]
    report = evaluate(stay, replace(coupled(), names=names))
    console = Console(width=120, record=True, file=io.StringIO())
    for metric in report.scores:
        console.print(report.table(metric))
    shown = console.export_text()
    for name in names:
        assert shown.count(name) == len(report.scores), name
    figure = report.plot()
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels[:4] == names
    assert not any(text.get_parse_math() for text in figure.axes[0].get_yticklabels())


@pytest.mark.parametrize("count", [1, 2, 16, 17, 45])
def test_the_figure_has_every_pair_and_every_method(count, tmp_path):
    pairs = coupled(pairs=count, n=3)
    report = evaluate(stay, pairs, train=coupled(seed=9))
    figure = report.plot(tmp_path / "error.png")
    axes = figure.axes[0]
    assert (tmp_path / "error.png").stat().st_size > 0
    assert axes.get_xlabel() == "W2 (rad), log axis"
    assert axes.get_xscale() == "log"
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == [*report.names, *(["mean, 95 %"] if count > 1 else [])]
    drawn = [line.get_xdata() for line in axes.lines if len(line.get_xdata()) == count and line.get_marker() != "None"]
    for values in report.methods("w2").values():
        assert any(np.array_equal(values.numpy(), x) for x in drawn)


def test_a_value_of_zero_stands_left_of_the_log_axis():
    pairs = coupled()
    axes = evaluate(onto(pairs), pairs).plot().axes[0]
    assert axes.get_xticklabels()[0].get_text() == "0"
    left = axes.get_xlim()[0]
    assert any(np.all(line.get_xdata() == left) and len(line.get_xdata()) == 4 for line in axes.lines)


@pytest.mark.slow
def test_reference_figures_of_the_storms():
    """Fitted on 1980-2014, mean over 2015-2024, km: computed by other code, with other draws, from the same table."""
    train, later = storms(years=range(1980, 2015)), storms(years=range(2015, 2025))

    def means(report: Report) -> dict[str, float]:
        return {name: mean_of(values) * KM for name, values in report.methods("w2").items()}

    assert means(evaluate(stay, later, train=train, neighbours=10))["nearest"] == pytest.approx(1339, abs=0.5)
    assert means(evaluate(stay, later, train=train, neighbours=3))["nearest"] == pytest.approx(1272, abs=0.5)
    runs = [means(evaluate(stay, later, train=train, seed=seed)) for seed in range(8)]
    assert runs[0]["map"] == runs[0]["identity"] == pytest.approx(2341, abs=0.5)
    assert runs[0]["nearest"] == pytest.approx(1310, abs=0.5)  # k = 1; this library's own figure
    # One mean over ten seasons varies by 143 km from draw to draw (40 draws), the noise (5 halvings) by 73 km.
    for name, expected, spread in (("climatology", 2069, 143), ("noise", 2676, 73)):
        found = sum(run[name] for run in runs) / len(runs)
        assert found == pytest.approx(expected, abs=3 * spread / math.sqrt(len(runs))), name


@pytest.mark.bad_input
class TestBadInput:
    def test_dimension(self):
        with pytest.raises(ValueError, match="expected d = 4, as the transformer, got d = 3"):
            evaluate(rich_transformer(4, seed=0), coupled())
        with pytest.raises(ValueError, match="train: expected d = 3, as the pairs, got d = 4"):
            evaluate(stay, coupled(), train=coupled(d=4))

    def test_map_of_another_shape(self):
        with pytest.raises(ValueError, match=r"points of shape \(4, 6, 3\), as the sources, got \(4, 2, 3\)"):
            evaluate(lambda source: TokenMeasure(source.points[:, :2]), coupled())
        with pytest.raises(ValueError, match=r"got \(6, 3\)"):
            evaluate(lambda source: source[0], coupled())

    def test_map_that_drops_an_atom(self):
        weights = torch.tensor([0.5, 0.5, 0, 0, 0, 0], dtype=torch.float64).expand(4, 6)
        with pytest.raises(ValueError, match="pair 'p0', row 2: expected the atoms of the source to keep their rows"):
            evaluate(lambda source: TokenMeasure(source.points, weights), coupled())

    def test_map_that_is_none(self):
        with pytest.raises(TypeError, match="expected it to return a TokenMeasure, got Tensor"):
            evaluate(lambda source: source.points, coupled())
        with pytest.raises(TypeError, match="expected a Transformer or a function of a TokenMeasure, got str"):
            evaluate("theta.safetensors", coupled())
        with pytest.raises(TypeError, match="pairs: expected MeasurePairs, got TokenMeasure"):
            evaluate(stay, coupled().source)
        with pytest.raises(TypeError, match="train: expected MeasurePairs, got str"):
            evaluate(stay, coupled(), train="train.csv")

    def test_numbers(self):
        with pytest.raises(ValueError, match="bootstrap: expected at least 1 resample, got 0"):
            evaluate(stay, coupled(), bootstrap=0)
        with pytest.raises(ValueError, match=r"neighbours: expected 1 to 18, .* got 19"):
            evaluate(stay, coupled(), neighbours=19)

    def test_metric(self):
        report = evaluate(stay, replace(coupled(), coupling=None))
        with pytest.raises(ValueError, match="metric: 'w3' is not a metric; this report has w2, w1, sinkhorn"):
            report.table("w3")
        with pytest.raises(ValueError, match="metric: 'max_error' needs a known coupling"):
            report.plot(metric="max_error")

    def test_files(self, tmp_path):
        report = evaluate(stay, coupled())
        with pytest.raises(OSError, match="there is no folder"):
            report.to_json(tmp_path / "no" / "report.json")
        with pytest.raises(ValueError, match=r"expected a file name that ends in one of \.png, \.pdf, \.svg"):
            report.plot(tmp_path / "report.bmp")
