use super::scale::Tick;
use super::*;

fn labels(scale: &Scale, n: usize) -> Vec<String> {
    scale.ticks(n).into_iter().map(|tick: Tick| tick.label).collect()
}

#[test]
fn axes_have_round_ends_and_plain_labels() {
    let scale = Scale::around([3.1, 58.0]);
    assert_eq!(scale, Scale::Linear { low: 0.0, high: 60.0 });
    assert_eq!(labels(&scale, 5), ["0", "20", "40", "60"]);
    assert_eq!(labels(&Scale::around([-0.3, 0.1]), 5), ["−0.3", "−0.2", "−0.1", "0.0", "0.1"]);
    let far = Scale::around([0.95, 0.99]);
    assert!(matches!(far, Scale::Linear { low, .. } if low > 0.9), "{far:?}");
    assert!(matches!(Scale::around([]), Scale::Linear { .. }));
    assert_eq!(labels(&Scale::whole(10.0, 12.0), 6), ["10", "11", "12"]);
    assert_eq!(labels(&Scale::whole(1.0, 40.0), 6), ["10", "20", "30", "40"]);
}

#[test]
fn constant_values_stand_above_zero_and_labels_differ() {
    let rounded = [7e-4, 7e-4 * (1.0 + 1e-12)];
    for (values, low, high) in
        [([2.0, 2.0], 0.0, 2.0), ([0.0, 0.0], 0.0, 1.0), ([-3.0, -3.0], -3.0, 0.0), (rounded, 0.0, 8e-4)]
    {
        let Scale::Linear { low: found_low, high: found_high } = Scale::around(values) else { panic!() };
        assert!((found_low - low).abs() < 1e-9 && (found_high - high).abs() < 1e-9, "{values:?}");
    }
    assert_eq!(labels(&Scale::around(rounded), 5), ["0", "2e-4", "4e-4", "6e-4", "8e-4"]);
    assert_eq!(labels(&Scale::around([0.0, 0.0012]), 5), ["0", "5e-4", "0.001", "0.0015"]);
    for narrow in [[2.0001, 2.0003], [1e7 + 1.0, 1e7 + 9.0], [0.12341, 0.12349]] {
        let labels = labels(&Scale::around(narrow), 5);
        let distinct: std::collections::BTreeSet<_> = labels.iter().collect();
        assert!(labels.len() > 2 && distinct.len() == labels.len(), "{labels:?}");
    }
}

#[test]
fn a_logarithmic_axis_has_powers_and_a_place_for_zero() {
    let scale = Scale::log_or_zero([0.0, 3e-5, 2e-3]).unwrap();
    assert_eq!(scale, Scale::LogOrZero { low: 1e-5, high: 1e-2 });
    assert_eq!(labels(&scale, 5), ["0", "0.01", "0.001", "1e-4", "1e-5"]);
    assert_eq!(scale.fraction(0.0), 0.0);
    assert!(scale.fraction(1e-5) > 0.1 && (scale.fraction(1e-2) - 1.0).abs() < 1e-12);
    assert_eq!(Scale::log_around([0.0, -1.0]), None);
}

#[test]
fn numbers_keep_three_digits_that_count() {
    let shown = [0.0, 0.14098, 63.671, 4769.0, 55799.0, 1.6e-4, -0.5, 1.0, 0.002, 2.5e7].map(number);
    assert_eq!(shown, ["0", "0.141", "63.7", "4769", "55799", "1.6e-4", "-0.5", "1", "0.002", "2.5e7"]);
}

#[test]
fn a_legend_breaks_where_a_name_does_not_fit_and_not_before_the_first() {
    let height = |names: &[&str]| {
        let entries: Vec<_> = names.iter().map(|name| (LegendKey::Patch(Ink::Text, 1.0), *name)).collect();
        draw_legend(&mut Vec::new(), &entries)
    };
    let long = "a long name ".repeat(20);
    assert_eq!((height(&[]), height(&["a", "b"]), height(&[&long])), (4.0, 24.0, 24.0));
    assert_eq!(height(&["a", &long, "b"]), 24.0 + 2.0 * LEGEND_LINE);
}

#[test]
fn numbers_and_labels_change_their_form_at_their_limits() {
    let shown = [0.001, 9e-4, 999_999.0, 1e6, -1e-7, f64::INFINITY, 1200.0].map(number);
    assert_eq!(shown, ["0.001", "9e-4", "999999", "1e6", "-1e-7", "inf", "1200"]);
    assert_eq!(labels(&Scale::Log { low: 1.0, high: 1e5 }, 5), ["100000", "10000", "1000", "100", "10", "1"]);
    assert_eq!(labels(&Scale::Log { low: 1.0, high: 1e6 }, 5), ["1e6", "10000", "100", "1"]);
    assert_eq!(labels(&Scale::around([0.0, 2e6]), 5), ["0", "500000", "1e6", "1.5e6", "2e6"]);
    assert_eq!(labels(&Scale::whole(0.0, 3.0), 6), ["0", "1", "2", "3"]);
}

fn curves() -> Curves {
    let point = |x: f64, y: f64| CurvePoint { x, y, interval: Some((y - 1.0, y + 1.0)) };
    let line = |label: &str, series| Curve {
        label: label.into(),
        series,
        points: (1..=5).map(|x| point(f64::from(x), f64::from(x * x))).collect(),
        seeds: Vec::new(),
    };
    Curves {
        x_label: "step".into(),
        unit: "%",
        y: Scale::around([0.0, 26.0]),
        bands: Vec::new(),
        lines: vec![line("a <b>", 0), line("b", 1)],
    }
}

#[test]
fn lines_stay_inside_their_frame_and_tell_their_values() {
    let scene = curves().draw();
    let svg = to_svg(&scene, "squares");
    assert_eq!(svg.matches("class=\"hit\"").count(), 5);
    assert!(svg.contains("step 3\na &lt;b&gt;  9 %  (8 to 10)\nb  9 %"), "{svg}");
    // Both lines have the value 9 at this x, and so the same place.
    let keys = svg.split("step 3\n").nth(1).unwrap().split("data-k=\"").nth(1).unwrap();
    let places: Vec<&str> = keys.split('"').next().unwrap().split(' ').collect();
    assert!(places[0].starts_with("0:0:") && places[1].starts_with("1:1:"), "{places:?}");
    assert_eq!(places[0][4..], places[1][4..]);
    let legend = "<g class=\"key\" data-key=\"1\" tabindex=\"0\" role=\"button\"";
    assert!(svg.contains(legend) && svg.matches("data-of=\"1\"").count() == 2, "{svg}");
    let flat = |mark: &Mark| match mark {
        Mark::Keyed { marks, .. } => marks.clone(),
        other => vec![other.clone()],
    };
    for mark in &scene.marks.iter().flat_map(flat).collect::<Vec<_>>() {
        if let Mark::Line { points, .. } | Mark::Area { points, .. } = mark {
            for (x, y) in points {
                assert!((0.0..=scene.width).contains(x) && (0.0..=scene.height).contains(y), "{mark:?}");
            }
        }
    }
}

#[test]
fn a_png_has_the_ink_of_its_series_and_a_white_edge() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("squares.png");
    let figure = Figure {
        name: "squares".into(),
        title: "Squares, τ".into(),
        note: "a long note ".repeat(12),
        scene: curves().draw(),
    };
    write_png(&path, &[&figure, &figure]).unwrap();
    let pixmap = tiny_skia::Pixmap::load_png(&path).unwrap();
    // A legend of one line, the frame of 190 and its axis; titles, and notes of two lines above.
    assert_eq!((pixmap.width(), pixmap.height()), (2 * (2 * 420 + 2 * 16 + 36), 708));
    // Ink left and right of a white gap between the figures.
    for row in pixmap.pixels().chunks(pixmap.width() as usize) {
        assert!(row[2 * (16 + 420) + 4..2 * (16 + 420 + 36) - 4].iter().all(|p| p.red() == 255));
    }
    let ink = |columns: std::ops::Range<usize>| {
        let rows = pixmap.pixels().chunks(pixmap.width() as usize);
        rows.flat_map(|row| &row[columns.clone()]).filter(|p| p.red() < 255).count() as f64
    };
    let (left, right) = (ink(32..872), ink(944..1784));
    assert!(left > 10_000.0 && (right / left - 1.0).abs() < 0.01, "{left} {right}");
    let has =
        |r: u8, g: u8, b: u8| pixmap.pixels().iter().any(|p| (p.red(), p.green(), p.blue()) == (r, g, b));
    assert!(has(0x00, 0x72, 0xb2) && has(0xd5, 0x5e, 0x00) && has(0x1a, 0x1d, 0x21));
    assert!(pixmap.pixels()[..pixmap.width() as usize * 8].iter().all(|p| p.red() == 255));
}

#[test]
fn the_font_has_every_sign_that_axes_use() {
    for c in "0123456789−·τσΔ≥<%()–".chars() {
        assert!(png::text_width(&c.to_string(), 12.0) > 0.0, "{c}");
        assert!(png::has_glyph(c), "{c}");
    }
}

/// Every kind of figure, with marks at its edges.
fn figures() -> [Scene; 5] {
    let bar = |value: f64, interval| Some(Bar { value, interval, hover: format!("{value} of it") });
    let group = |label: &str, bars| BarGroup { label: label.into(), bars };
    let bars = Bars {
        series: vec![("a".into(), Ink::Series(0)), ("b".into(), Ink::Series(1))],
        groups: vec![
            group("first", vec![bar(3.0, Some((2.5, 4.5))), bar(-1.0, None)]),
            group("the second group", vec![None, bar(0.0, None), bar(2.0, Some((0.5, 1.5)))]),
        ],
    };
    let band = Band {
        label: "range".into(),
        series: 2,
        points: vec![(1.0, 2.0, 8.0), (2.0, 3.0, 9.0), (4.0, 1.0, 25.0)],
        opacity: 0.2,
    };
    let mut many = curves();
    many.lines.push(Curve::over_seeds(
        "a name that is so long that the legend needs another line",
        7,
        vec![vec![(1.0, 4.0), (3.0, 7.0)], vec![(1.0, 6.0), (2.0, 1.0), (3.0, 8.0)]],
        &PERCENT,
    ));
    many.bands.push(band);
    let dot = |x: f64, y: f64, ink| Dot { x, y, ink, radius: 3.0, hover: format!("{x}, {y}") };
    let cross = |dot: Dot, label: &str| Cross {
        dot,
        x_interval: Some((0.2, 30.0)),
        y_interval: Some((-5.0, 0.5)),
        label: label.into(),
    };
    let guides = vec![
        Guide::Upright { x: 0.1, label: "left".into() },
        Guide::Upright { x: 20.0, label: "right".into() },
        Guide::Level { y: 0.25, label: "level".into() },
        Guide::Slope { from: (0.1, 0.0), to: (10.0, 1.0), label: "slope".into() },
    ];
    let scatter = Scatter {
        x_label: "x".into(),
        y_label: "y".into(),
        x: Scale::log_or_zero([0.0, 0.1, 25.0]).unwrap(),
        y: Scale::exactly(-1.0, 1.0),
        dots: vec![dot(0.0, 0.5, Ink::Heat(0.0)), dot(0.1, -0.5, Ink::Heat(0.3)), dot(25.0, 1.0, Ink::Text)],
        crosses: Vec::new(),
        guides,
        heat: Some(("heat".into(), 0.0, 2.5)),
    };
    let crossed = Scatter {
        crosses: vec![cross(dot(1.0, 0.0, Ink::Series(0)), "one"), cross(dot(2.0, 0.1, Ink::Series(7)), "")],
        heat: None,
        ..scatter.clone()
    };
    [bars.draw(), many.draw(), many.draw_staircase(), scatter.draw(), crossed.draw()]
}

/// The committed figures are what was looked at; with STAPO_WRITE_GOLDENS=1 the test writes them again.
#[test]
fn every_mark_of_a_figure_stands_in_its_place() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/charts.svg");
    let drawn = figures().map(|scene| to_svg(&scene, "figure").replace("><", ">\n<") + "\n").concat();
    if std::env::var_os("STAPO_WRITE_GOLDENS").is_some() {
        std::fs::write(path, &drawn).unwrap();
    }
    let golden = std::fs::read_to_string(path).unwrap();
    for (n, (found, expected)) in drawn.lines().zip(golden.lines()).enumerate() {
        assert_eq!(found, expected, "line {} of charts.svg", n + 1);
    }
    assert_eq!(drawn.lines().count(), golden.lines().count());
}

#[test]
fn axes_at_their_limits() {
    let linear = |low, high| Scale::Linear { low, high };
    // Exactly 0.6 of the highest value is far from 0; below it, the axis begins at 0.
    assert_eq!(Scale::around([6.0, 10.0]), linear(6.0, 10.0));
    assert_eq!(Scale::around([5.9, 10.0]), linear(0.0, 10.0));
    assert_eq!(Scale::around([-10.0, -6.0]), linear(-10.0, -6.0));
    assert_eq!(Scale::around([-10.0, -5.9]), linear(-10.0, 0.0));
    assert_eq!(Scale::around([f64::NAN, 4.0, f64::INFINITY]), linear(0.0, 4.0));
    assert_eq!(Scale::exactly(2.0, 2.0), linear(1.5, 2.5));
    assert_eq!(Scale::whole(2.0, 2.0), Scale::Whole { low: 1.5, high: 2.5 });
    assert_eq!(Scale::whole(1.0, 2.0), Scale::Whole { low: 1.0, high: 2.0 });
    assert_eq!(Scale::log_around([1.0, 100.0]), Some(Scale::Log { low: 1.0, high: 100.0 }));
    assert_eq!(Scale::log_around([5.0]), Some(Scale::Log { low: 1.0, high: 10.0 }));
    let log = Scale::Log { low: 1.0, high: 100.0 };
    assert_eq!([0.5, 1.0, 10.0, 100.0, 1e3].map(|x| log.fraction(x)), [0.0, 0.0, 0.5, 1.0, 1.0]);
    assert_eq!(
        [-1.0, 0.0, 5.0, 10.0, 11.0].map(|x| linear(0.0, 10.0).fraction(x)),
        [0.0, 0.0, 0.5, 1.0, 1.0]
    );
    let zero = Scale::LogOrZero { low: 1.0, high: 100.0 };
    assert!((zero.fraction(10.0) - 0.56).abs() < 1e-12 && (zero.fraction(1.0) - 0.12).abs() < 1e-12);
    // Of seven powers and more every second one is labelled, from the highest down.
    assert_eq!(labels(&Scale::Log { low: 1.0, high: 1e5 }, 5).len(), 6);
    assert_eq!(labels(&Scale::Log { low: 1.0, high: 1e7 }, 5), ["1e7", "100000", "1000", "10"]);
    assert_eq!(labels(&linear(0.0, 2e6), 4), ["0", "500000", "1e6", "1.5e6", "2e6"]);
    assert_eq!(
        [1e-3, 9.99e-4, 999_999.0, 1e6, -12.3456].map(number),
        ["0.001", "9.99e-4", "999999", "1e6", "-12.3"]
    );
    assert_eq!((significant(1234.5, 5), number(f64::INFINITY)), ("1234.5".into(), "inf".into()));
    let dashes = [0, 5, 6, 12, 18, 40].map(Dash::for_series);
    assert_eq!(dashes, [Dash::Solid, Dash::Solid, Dash::Dashed, Dash::Dotted, Dash::Mixed, Dash::Mixed]);
    assert_eq!([0.125, 0.3].map(heat_rgb), [(50, 102, 140), (41, 141, 138)]);
}

#[test]
fn heat_goes_from_end_to_end() {
    assert_eq!((heat_rgb(0.0), heat_rgb(1.0)), (HEAT[0], HEAT[4]));
    assert_eq!(heat_rgb(f64::NAN.max(0.5)), HEAT[2]);
}

#[test]
fn few_seeds_are_thin_lines_and_four_make_an_interval() {
    let seeds = |n: usize| (0..n).map(|seed| vec![(1.0, seed as f64), (2.0, 4.0 + seed as f64)]).collect();
    for n in [1, 3, 4] {
        let curve = Curve::over_seeds("a", 0, seeds(n), &ANY);
        assert_eq!(curve.seeds.len(), if n == 1 { 0 } else { n });
        assert!(curve.points.iter().all(|point| point.interval.is_some() == (n == 4)), "{n} seeds");
    }
    let lines = vec![Curve::over_seeds("a", 0, seeds(2), &ANY)];
    let y = Scale::around([0.0, 6.0]);
    let scene = Curves { x_label: "step".into(), unit: "", y, bands: Vec::new(), lines }.draw();
    let svg = to_svg(&scene, "seeds");
    assert_eq!(svg.matches("stroke-width=\"0.8\"").count(), 2, "{svg}");
    assert!(svg.contains("a  0.5  (seeds 0, 1)"), "{svg}");
}

#[test]
fn seeds_make_a_band_where_all_of_them_have_a_step() {
    let curves = [vec![(1.0, 1.0), (2.0, 4.0), (3.0, 5.0)], vec![(1.0, 3.0), (3.0, 5.0), (4.0, 0.0)]];
    let points = band_over(&curves, &ANY);
    assert_eq!(points.iter().map(|p| (p.x, p.y)).collect::<Vec<_>>(), [(1.0, 2.0), (3.0, 5.0)]);
    // Two values 1 and 3: standard error 1, t at 0.975 with one degree of freedom 12.706.
    let (low, high) = points[0].interval.unwrap();
    assert!((low - (2.0 - 12.7062)).abs() < 1e-3 && (high - 14.7062).abs() < 1e-3, "{low} {high}");
    let share = band_over(&curves, &PERCENT)[0].interval.unwrap();
    assert_eq!(share.0, 0.0);
    assert_eq!(band_over(&curves, &(0.0..=f64::INFINITY))[0].interval.unwrap(), (0.0, high));
    assert_eq!(band_over(&curves[..1], &ANY)[0].interval, None);
}
