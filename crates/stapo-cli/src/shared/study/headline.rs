//! The table of methods by setting, with the relative gain over the best baseline that abstracts quote.

use super::table::{Cell, RowKind, Table, text};
use stapo_core::stats::{Contest, StatsError, headline_gain};

/// Averages over benchmarks, in percent, of methods under several settings (sizes, decodings).
#[derive(Debug, Clone)]
pub struct Standings {
    pub methods: Vec<String>,
    /// Index of the proposed method in `methods`.
    pub method: usize,
    /// Each setting with one average per method.
    pub rows: Vec<(String, Vec<f64>)>,
}

impl Standings {
    /// Relative gain of the method over the best baseline, averaged over the rows.
    pub fn gain(&self) -> Result<f64, StatsError> {
        let contest = |(_, averages): &(String, Vec<f64>)| Contest {
            method: averages[self.method],
            baselines: averages
                .iter()
                .enumerate()
                .filter(|(idx, _)| *idx != self.method)
                .map(|(_, average)| *average)
                .collect(),
        };
        headline_gain(&self.rows.iter().map(contest).collect::<Vec<_>>())
    }

    pub fn table(&self, name: &'static str) -> Result<Table, StatsError> {
        let mut titles = vec![String::new()];
        titles.extend(self.methods.iter().map(|method| format!("#{method}")));
        titles.push("#gain over the best baseline".to_string());
        let titles: Vec<&str> = titles.iter().map(String::as_str).collect();
        let mut table = Table::new(name, &titles);
        for row in &self.rows {
            let alone = Standings { rows: vec![row.clone()], ..self.clone() };
            let averages = row.1.iter().map(|average| text(format!("{average:.2}")));
            let cells = [text(&row.0)].into_iter().chain(averages).chain([percent(alone.gain()?)]).collect();
            table.push(cells);
        }
        let mut cells = vec![text("average")];
        cells.extend(self.methods.iter().map(|_| text("")));
        cells.push(percent(self.gain()?));
        table.push_as(RowKind::Total, cells);
        Ok(table)
    }
}

fn percent(gain: f64) -> Cell {
    text(format!("{:+.2} %", 100.0 * gain).replacen('-', "−", 1))
}

/// The published averages of six benchmarks (arXiv 2602.15620, main table) at T = 1.0 and at T = 0.7 with top-p 0.9.
pub fn published() -> [(&'static str, Standings); 2] {
    let standings = |rows: [(&str, [f64; 4]); 3]| Standings {
        methods: ["GRPO", "20-Entropy", "JustRL", "STAPO"].map(String::from).to_vec(),
        method: 3,
        rows: rows.map(|(size, averages)| (size.to_string(), averages.to_vec())).to_vec(),
    };
    [
        (
            "T = 1.0",
            standings([
                ("Qwen3-1.7B-Base", [29.92, 29.60, 31.10, 36.85]),
                ("Qwen3-8B-Base", [56.24, 57.63, 50.70, 60.96]),
                ("Qwen3-14B-Base", [61.49, 60.77, 55.74, 67.76]),
            ]),
        ),
        (
            "T = 0.7, top-p 0.9",
            standings([
                ("Qwen3-1.7B-Base", [31.04, 33.05, 34.73, 36.74]),
                ("Qwen3-8B-Base", [55.26, 58.00, 56.42, 60.18]),
                ("Qwen3-14B-Base", [60.53, 64.53, 66.71, 67.80]),
            ]),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_table_gives_the_published_gains_in_the_page() {
        let [(_, at_1_0), (_, at_0_7)] = published();
        for (standings, gain) in [(at_1_0, "+11.49 %"), (at_0_7, "+3.73 %")] {
            let html = standings.table("published").unwrap().to_html();
            let (rows, total) = html.split_once("class=\"total\"").unwrap();
            assert!(total.contains(gain) && !rows.contains(gain), "{html}");
        }
    }

    #[test]
    fn a_method_below_its_baseline_loses() {
        let standings = Standings {
            methods: vec!["a".into(), "b".into()],
            method: 1,
            rows: vec![("x".into(), vec![50.0, 40.0])],
        };
        assert!(standings.table("t").unwrap().to_html().contains("−20.00 %"));
    }
}
