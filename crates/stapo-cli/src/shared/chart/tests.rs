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
    assert!(matches!(Scale::around([2.0, 2.0]), Scale::Linear { low, high } if low < 2.0 && high > 2.0));
    assert!(matches!(Scale::around([]), Scale::Linear { .. }));
    assert_eq!(labels(&Scale::whole(10.0, 12.0), 6), ["10", "11", "12"]);
    assert_eq!(labels(&Scale::whole(1.0, 40.0), 6), ["10", "20", "30", "40"]);
}

#[test]
fn a_logarithmic_axis_has_powers_and_a_place_for_zero() {
    let scale = Scale::log_or_zero([0.0, 3e-5, 2e-3]).unwrap();
    assert_eq!(scale, Scale::LogOrZero { low: 1e-5, high: 1e-2 });
    assert_eq!(labels(&scale, 5), ["0", "0.01", "0.001", "1e-4", "1e-5"]);
    assert_eq!(scale.place(0.0), 0.0);
    assert!(scale.place(1e-5) > 0.1 && (scale.place(1e-2) - 1.0).abs() < 1e-12);
    assert_eq!(Scale::log_around([0.0, -1.0]), None);
}

#[test]
fn numbers_keep_three_digits_that_count() {
    let shown = [0.0, 0.14098, 63.671, 4769.0, 55799.0, 1.6e-4, -0.5, 1.0, 0.002, 2.5e7].map(number);
    assert_eq!(shown, ["0", "0.141", "63.7", "4769", "55799", "1.6e-4", "-0.5", "1", "0.002", "2.5e7"]);
}

fn curves() -> Curves {
    let point = |x: f64, y: f64| CurvePoint { x, y, interval: Some((y - 1.0, y + 1.0)) };
    let line = |label: &str, series| Curve {
        label: label.into(),
        series,
        points: (1..=5).map(|x| point(f64::from(x), f64::from(x * x))).collect(),
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
    for mark in &scene.marks {
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
    assert_eq!(pixmap.width(), 2 * (2 * 420 + 2 * 16 + 36));
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

#[test]
fn heat_goes_from_end_to_end() {
    assert_eq!((heat_rgb(0.0), heat_rgb(1.0)), (HEAT[0], HEAT[4]));
    assert_eq!(heat_rgb(f64::NAN.max(0.5)), HEAT[2]);
}
