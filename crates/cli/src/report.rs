//! Tables and figures for people.

use std::fmt::Write;

/// How a column is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// A table of text with a heading line.
#[derive(Debug)]
pub struct Table {
    columns: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub fn new(columns: &[(&str, Align)]) -> Table {
        let heading = columns.iter().map(|(name, _)| name.to_string()).collect();
        Table { columns: columns.iter().map(|(_, align)| *align).collect(), rows: vec![heading] }
    }

    /// Adds a row of as many cells as there are headings.
    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells);
    }

    /// Whether there is only the heading.
    #[cfg(feature = "hub")]
    pub fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    /// Indented lines, columns two spaces apart.
    pub fn render(&self) -> String {
        let width = |c: usize| self.rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let mut out = String::new();
        for row in &self.rows {
            let mut line = String::from(" ");
            for ((cell, align), &width) in row.iter().zip(&self.columns).zip(&widths) {
                let pad = " ".repeat(width - cell.chars().count());
                let _ = match align {
                    Align::Left => write!(line, " {cell}{pad} "),
                    Align::Right => write!(line, " {pad}{cell} "),
                };
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out
    }
}

/// Bytes with a binary unit and three significant places or more.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{n} B"),
        _ => format!("{value:.2} {}", UNITS[unit]),
    }
}

/// A count with a decimal unit: 25.23 B, 268.10 M.
pub fn count(n: u64) -> String {
    match n {
        0..=999_999 => n.to_string(),
        1_000_000..=999_999_999 => format!("{:.2} M", n as f64 / 1e6),
        _ => format!("{:.2} B", n as f64 / 1e9),
    }
}

/// Middle value of a sorted or unsorted list; the mean of the middle two when there is no one middle.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_line_up_whatever_is_in_them() {
        let mut table = Table::new(&[("name", Align::Left), ("n", Align::Right)]);
        table.row(vec!["größe".into(), "7".into()]);
        table.row(vec!["x".into(), "123".into()]);
        assert_eq!(table.render(), "  name     n\n  größe    7\n  x      123\n");
    }

    #[test]
    fn figures_have_units() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(3 << 29), "1.50 GiB");
        assert_eq!(count(999_999), "999999");
        assert_eq!(count(25_230_000_000), "25.23 B");
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
