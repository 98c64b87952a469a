//! `stapo report`: from run folders to a page, pictures, tables and event files.

mod categories;
mod claims;
mod contents;
mod curves;
mod gradients;
mod judge;
mod pareto;
mod quadrants;
mod survival;
mod tensorboard;
mod tokens;

use crate::shared::chart::{Figure, write_png};
use crate::shared::page;
use crate::shared::study::Study;
use crate::shared::study::table::csv_line;
use anyhow::{Context, Result, bail};
use contents::Contents;
use stapo_core::record::catalogue::{ALL, DERIVED};
use stapo_rl::run::disk::write_whole;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Writes a report on a run, several runs or an experiment: one HTML file that needs nothing else.
#[derive(clap::Args)]
pub struct Args {
    /// The run folder, or an experiment's (a folder with experiment.json). Several are shown on one page, side by side.
    #[arg(value_name = "RUN|EXPERIMENT", required = true)]
    folders: Vec<PathBuf>,

    /// The page; by default report.html in the folder, for several folders in the current one.
    #[arg(short, long = "out", alias = "output", value_name = "FILE")]
    output: Option<PathBuf>,

    /// Writes every table, and the metrics of every run, as CSV files into this folder.
    #[arg(long, value_name = "DIR")]
    csv: Option<PathBuf>,

    /// Writes every figure as a PNG file into this folder; a name that ends in .png gets the one of --figure.
    #[arg(long, value_name = "DIR|FILE.png")]
    png: Option<PathBuf>,

    /// Which figure a single PNG file shows; by default `overview`, accuracy and entropy.
    #[arg(long, value_name = "NAME", requires = "png")]
    figure: Option<String>,

    /// Writes TensorBoard event files into this folder, one folder per run.
    #[arg(long, value_name = "DIR")]
    tensorboard: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if let (Some(figure), Some(path)) = (&args.figure, args.png.as_deref().filter(|path| !is_picture(path))) {
        bail!(
            "--figure {figure}: has no effect, because --png {} names a folder, which gets every figure\nhint: name a file, as in --png {figure}.png",
            path.display()
        );
    }
    let study = Study::open_all(&args.folders)?;
    let contents = Contents::gather(&study)?;
    let figure = args.figure.as_deref().unwrap_or("overview");
    let pictures = args.png.as_deref().map(|path| Pictures::choose(path, figure, &study, &contents));
    let pictures = pictures.transpose()?;
    let page = page::write(args.output.as_deref(), &study.folder, "report.html", &contents.to_html())?;
    println!("{}", page.display());
    if let Some(folder) = &args.csv {
        write_csv(folder, &study, &contents)?;
        println!("{}", folder.display());
    }
    if let Some(pictures) = pictures {
        pictures.write()?;
        println!("{}", pictures.path.display());
    }
    if let Some(folder) = &args.tensorboard {
        tensorboard::write(folder, &study)?;
        println!("{}", folder.display());
    }
    Ok(ExitCode::SUCCESS)
}

fn make_folder(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("folder {}", folder.display()))
}

/// The PNG files to write, chosen before anything is written.
struct Pictures<'a> {
    path: &'a Path,
    figures: Vec<Figure>,
    overview: Vec<Figure>,
}

impl<'a> Pictures<'a> {
    fn choose(path: &'a Path, name: &str, study: &Study, contents: &Contents) -> Result<Self> {
        let mut figures: Vec<Figure> = contents.figures().cloned().collect();
        let overview = curves::overview(&figures, study);
        if is_picture(path) {
            let names: Vec<String> = figures.iter().map(|figure| figure.name.clone()).collect();
            match name {
                "overview" => figures.clone_from(&overview),
                name => figures.retain(|figure| figure.name == name),
            }
            if figures.is_empty() {
                bail!("--figure {name}: no such figure here\nhint: overview, {}", names.join(", "));
            }
        }
        Ok(Pictures { path, figures, overview })
    }

    fn write(&self) -> Result<()> {
        if is_picture(self.path) {
            return write_png(self.path, &self.figures.iter().collect::<Vec<_>>());
        }
        make_folder(self.path)?;
        if !self.overview.is_empty() {
            write_png(&self.path.join("overview.png"), &self.overview.iter().collect::<Vec<_>>())?;
        }
        let write_one =
            |figure: &Figure| write_png(&self.path.join(format!("{}.png", figure.name)), &[figure]);
        self.figures.iter().try_for_each(write_one)
    }
}

/// Whether `--png` names one picture.
fn is_picture(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "png")
}

/// The tables of the report, and `metrics.csv` with every number of every step under its key in records.
fn write_csv(folder: &Path, study: &Study, contents: &Contents) -> Result<()> {
    make_folder(folder)?;
    for table in contents.tables() {
        write_whole(&folder.join(format!("{}.csv", table.name)), table.to_csv().as_bytes())?;
    }
    let columns = || ALL.iter().filter(|metric| !DERIVED.contains(&metric.key));
    let head = ["arm", "seed", "step"].into_iter().chain(columns().map(|metric| metric.key));
    let mut text = csv_line(&head.map(String::from).collect::<Vec<_>>());
    for (arm, run) in study.runs() {
        for metrics in &run.metrics {
            let values = columns()
                .map(|metric| (metric.value)(metrics).map_or(String::new(), |value| value.to_string()));
            let named = [arm.name.clone(), run.seed.to_string(), metrics.step.to_string()];
            let cells = named.into_iter().chain(values);
            text.push_str(&csv_line(&cells.collect::<Vec<_>>()));
        }
    }
    Ok(write_whole(&folder.join("metrics.csv"), text.as_bytes())?)
}

#[cfg(test)]
mod tests;
