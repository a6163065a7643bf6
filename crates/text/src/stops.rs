//! Stop strings in streamed text. A stop string may arrive in pieces, and none of its characters may leave before it is
//! known that they are not its beginning.

/// Watches text for stop strings.
#[derive(Debug, Clone)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    /// Which stop string was found.
    found: Option<usize>,
}

impl StopStrings {
    /// Empty strings are left out: they would stop everything at once.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        Self {
            stops: stops.into_iter().filter(|s| !s.is_empty()).collect(),
            held: String::new(),
            found: None,
        }
    }

    /// Takes a piece of text and returns what may be shown. After a stop nothing more is.
    pub fn push(&mut self, text: &str) -> String {
        if self.found.is_some() {
            return String::new();
        }
        self.held.push_str(text);
        // The stop that ends first wins, the longest if several do, so that the pieces' borders make no difference.
        let found = self
            .stops
            .iter()
            .enumerate()
            .filter_map(|(i, stop)| self.held.find(stop.as_str()).map(|at| (at + stop.len(), at, i)));
        if let Some((_, at, i)) = found.min() {
            self.found = Some(i);
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let starts = self.held.char_indices().map(|(at, _)| at);
        let safe =
            starts.into_iter().find(|&at| self.stops.iter().any(|stop| stop.starts_with(&self.held[at..])));
        let rest = self.held.split_off(safe.unwrap_or(self.held.len()));
        std::mem::replace(&mut self.held, rest)
    }

    /// Whether a stop string was found.
    pub fn stopped(&self) -> bool {
        self.found.is_some()
    }

    /// The stop string that was found.
    pub fn matched(&self) -> Option<&str> {
        self.found.map(|i| self.stops[i].as_str())
    }

    /// Whether there is nothing to look for.
    pub fn is_empty(&self) -> bool {
        self.stops.is_empty()
    }

    /// Ends the text: what was held back only in case is shown after all.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shows a text piece by piece; returns what was visible and whether it stopped.
    fn show(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut watch = StopStrings::new(stops.iter().map(|s| (*s).to_owned()));
        let mut shown: String = pieces.iter().map(|piece| watch.push(piece)).collect();
        shown += &watch.finish();
        (shown, watch.stopped())
    }

    #[test]
    fn k04_no_part_of_a_stop_string_leaks_at_any_split() {
        let text = "The quick brown fox.\nUser: é😀 own f";
        for (stops, kept, stopped) in [
            (vec!["own fox"], "The quick br", true),
            (vec!["\nUser:"], "The quick brown fox.", true),
            (vec!["fox.", "own", "quick brown fox."], "The quick br", true),
            (vec!["fox.", "quick brown fox."], "The ", true),
            (vec!["😀"], "The quick brown fox.\nUser: é", true),
            (vec!["own fx", "nothing"], text, false),
            (vec!["aab", ""], text, false),
        ] {
            let chars: Vec<String> = text.chars().map(String::from).collect();
            let single: Vec<&str> = chars.iter().map(String::as_str).collect();
            assert_eq!(show(&stops, &single), (kept.to_owned(), stopped), "{stops:?}");
            for (first, _) in text.char_indices() {
                for (second, _) in text.char_indices().filter(|(at, _)| *at >= first) {
                    let pieces = [&text[..first], &text[first..second], &text[second..]];
                    assert_eq!(show(&stops, &pieces), (kept.to_owned(), stopped), "{stops:?} {pieces:?}");
                }
            }
        }
    }

    #[test]
    fn a_false_start_inside_a_stop_string_is_not_lost() {
        assert_eq!(show(&["aab"], &["a", "a", "a", "b", "x"]), ("a".to_owned(), true));
        let mut watch = StopStrings::new(["zz".to_owned(), String::new(), "b".to_owned()]);
        assert_eq!((watch.push("ab"), watch.matched()), ("a".to_owned(), Some("b")));
        assert_eq!(show(&["abab"], &["aba", "cab", "a"]), ("abacaba".to_owned(), false));
    }

    #[test]
    fn text_is_held_no_longer_than_needed() {
        let mut watch = StopStrings::new(["xyz".to_owned()]);
        assert_eq!(watch.push("abx"), "ab");
        assert_eq!(watch.push("y"), "");
        assert_eq!(watch.push("a"), "xya");
    }
}
