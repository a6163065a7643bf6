//! The inside of a thought: its label, its text, and its end when that is spelled in ordinary tokens.

/// What opens a thought, spelled out.
pub(super) const OPENER: &str = "<|channel>";
/// What closes it.
const CLOSER: &str = "<channel|>";
/// The label of a thought, which is not shown.
const LABEL: &str = "thought\n";

/// A thought as it arrives.
#[derive(Debug)]
pub(super) struct Thought {
    /// The label so far, while it may still become one.
    label: Option<String>,
    /// A newline, or the beginning of a spelled closer, that is shown only if more text follows.
    held: String,
    /// Whether the opener was spelled in ordinary tokens. Only then is a spelled closer one: a model that thinks about
    /// markers must not end its thought by naming them.
    spelled: bool,
}

impl Thought {
    /// After an opener: the label comes next.
    pub fn labelled() -> Self {
        Self { label: Some(String::new()), held: String::new(), spelled: false }
    }

    /// After an opener in ordinary tokens.
    pub fn spelled() -> Self {
        Self { spelled: true, ..Self::labelled() }
    }

    /// Inside a thought that the prompt began with this text, label included.
    pub fn resumed(text: &str) -> Self {
        let mut thought = Self::labelled();
        thought.push(text);
        // What the prompt holds was shown long ago, a newline at its end included.
        thought.held.clear();
        thought
    }

    /// Takes text; returns what of it is certain to be thought, and what follows a spelled closer.
    pub fn push(&mut self, text: &str) -> (String, Option<String>) {
        let mut text = text.to_owned();
        if let Some(label) = self.label.take() {
            text = label + &text;
            match text.strip_prefix(LABEL) {
                Some(rest) => text = rest.to_owned(),
                None if LABEL.starts_with(&text) => {
                    self.label = Some(text);
                    return Default::default();
                }
                // Anything else in the label's place is thought.
                None => {}
            }
        }
        if text.is_empty() {
            return Default::default();
        }
        let mut text = std::mem::take(&mut self.held) + &text;
        let mut answer = None;
        if self.spelled {
            if let Some(at) = text.find(CLOSER) {
                answer = Some(text.split_off(at).split_off(CLOSER.len()));
            } else if let Some(at) =
                text.char_indices().map(|(at, _)| at).find(|&at| CLOSER.starts_with(&text[at..]))
            {
                self.held = text.split_off(at);
            }
        }
        // One newline before the closer belongs to the closer.
        if text.ends_with('\n') {
            text.pop();
            if answer.is_none() {
                self.held.insert(0, '\n');
            }
        }
        (text, answer)
    }

    /// What is left to show at the end: a beginning of a closer that never came, but no newline before the end.
    pub fn rest(&self) -> &str {
        if self.held == "\n" { "" } else { &self.held }
    }
}
