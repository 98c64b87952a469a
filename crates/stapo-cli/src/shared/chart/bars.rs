//! Grouped bars from zero, with intervals.

use super::png::text_width;
use super::scale::number;
use super::{
    Anchor, BROWSER, Dash, Frame, Ink, KeyPart, LABEL, LegendKey, Mark, Scale, Scene, WIDTH, draw_legend,
    rule, text,
};

#[derive(Debug, Clone)]
pub struct Bar {
    pub value: f64,
    pub interval: Option<(f64, f64)>,
    pub hover: String,
}

/// Bars next to one label, one per series; the place of an absent bar stays empty.
#[derive(Debug, Clone)]
pub struct BarGroup {
    pub label: String,
    pub bars: Vec<Option<Bar>>,
}

#[derive(Debug, Clone)]
pub struct Bars {
    /// Name and ink of each series.
    pub series: Vec<(String, Ink)>,
    pub groups: Vec<BarGroup>,
}

const ROW: f64 = 15.0;
const GROUP_GAP: f64 = 14.0;

impl Bars {
    /// Draws horizontal bars, so that long names need no rotated text.
    pub fn draw(&self) -> Scene {
        let mut marks = Vec::new();
        let legend: Vec<(LegendKey, &str)> =
            self.series.iter().map(|(name, ink)| (LegendKey::Patch(*ink, 0.9), name.as_str())).collect();
        let top = if legend.len() > 1 { draw_legend(&mut marks, &legend) } else { 4.0 } + 2.0;
        let group_height = ROW * self.series.len().max(1) as f64 + GROUP_GAP;
        let widest = self.groups.iter().map(|g| text_width(&g.label, LABEL)).fold(0.0, f64::max);
        let left = (BROWSER * widest + 12.0).clamp(40.0, 200.0);
        let bars = || self.groups.iter().flat_map(|group| group.bars.iter().flatten());
        let ends = bars().flat_map(|bar| [bar.value, bar.interval.map_or(bar.value, |(_, high)| high)]);
        let frame = Frame {
            left,
            top,
            width: WIDTH - left - 44.0,
            height: group_height * self.groups.len() as f64,
            x: Scale::around(ends.chain([0.0])),
            y: Scale::exactly(0.0, 1.0),
        };
        for tick in frame.x.ticks(5) {
            let x = frame.x_at(tick.value);
            marks.push(rule((x, top), (x, frame.bottom()), Ink::Grid, Dash::Solid));
            marks.push(text((x, frame.bottom() + 16.0), &tick.label, LABEL, Ink::Muted, Anchor::Middle));
        }
        for (idx, group) in self.groups.iter().enumerate() {
            let y = top + idx as f64 * group_height;
            let middle = y + group_height / 2.0 + 4.0;
            marks.push(text((left - 8.0, middle), &group.label, LABEL, Ink::Text, Anchor::End));
            for (row, bar) in group.bars.iter().enumerate() {
                let ink = self.series.get(row).map_or(Ink::Muted, |(_, ink)| *ink);
                if let Some(bar) = bar {
                    let shown = draw_bar(&frame, y + GROUP_GAP / 2.0 + ROW * row as f64, bar, ink);
                    marks.push(Mark::Keyed { key: row, part: KeyPart::Shown, marks: shown });
                }
            }
        }
        marks.push(rule((left, top), (left, frame.bottom()), Ink::Muted, Dash::Solid));
        Scene { width: WIDTH, height: frame.bottom() + 24.0, marks }
    }
}

fn draw_bar(frame: &Frame, y: f64, bar: &Bar, ink: Ink) -> Vec<Mark> {
    let zero = frame.x_at(0.0);
    let end = frame.x_at(bar.value);
    let corner = (zero.min(end), y + 1.5);
    let size = ((end - zero).abs().max(1.0), ROW - 3.0);
    let mut marks = vec![Mark::Box { corner, size, ink, opacity: 0.9, hover: Some(bar.hover.clone()) }];
    let mut right = end;
    if let Some((low, high)) = bar.interval {
        let (low, high) = (frame.x_at(low), frame.x_at(high));
        let middle = y + ROW / 2.0;
        marks.push(rule((low, middle), (high, middle), Ink::Text, Dash::Solid));
        for x in [low, high] {
            marks.push(rule((x, middle - 3.0), (x, middle + 3.0), Ink::Text, Dash::Solid));
        }
        right = right.max(high);
    }
    marks.push(text((right + 5.0, y + 11.5), &number(bar.value), 11.0, Ink::Muted, Anchor::Start));
    marks
}
