//! Gemma's control tokens, found by name: ids differ between generations and vocabularies.

/// Ids of the control tokens that a vocabulary has. Gemma 3 spells some of them differently; the fields mean the same.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SpecialIds {
    /// `<pad>`.
    pub pad: Option<u32>,
    /// `<eos>`.
    pub eos: Option<u32>,
    /// `<bos>`.
    pub bos: Option<u32>,
    /// `<unk>`.
    pub unk: Option<u32>,
    /// `<|turn>`, in Gemma 3 `<start_of_turn>`.
    pub turn_open: Option<u32>,
    /// `<turn|>`, in Gemma 3 `<end_of_turn>`.
    pub turn_close: Option<u32>,
    /// `<|channel>`: a thought begins.
    pub channel_open: Option<u32>,
    /// `<channel|>`: a thought ends.
    pub channel_close: Option<u32>,
    /// `<|think|>`: asks for thoughts.
    pub think: Option<u32>,
    /// `<|tool>`: a tool declaration begins.
    pub tool_open: Option<u32>,
    /// `<tool|>`.
    pub tool_close: Option<u32>,
    /// `<|tool_call>`.
    pub tool_call_open: Option<u32>,
    /// `<tool_call|>`.
    pub tool_call_close: Option<u32>,
    /// `<|tool_response>`.
    pub tool_response_open: Option<u32>,
    /// `<tool_response|>`.
    pub tool_response_close: Option<u32>,
    /// `<|"|>`: the string quote of calls and declarations.
    pub quote: Option<u32>,
    /// `<|image>`, in Gemma 3 `<start_of_image>`.
    pub image_open: Option<u32>,
    /// `<image|>`, in Gemma 3 `<end_of_image>`.
    pub image_close: Option<u32>,
    /// `<|image|>`, in Gemma 3 `<image_soft_token>`: the place of one image row.
    pub image: Option<u32>,
    /// `<|audio>`.
    pub audio_open: Option<u32>,
    /// `<audio|>`.
    pub audio_close: Option<u32>,
    /// `<|audio|>`.
    pub audio: Option<u32>,
    /// `<|video|>`.
    pub video: Option<u32>,
}

impl SpecialIds {
    /// Looks every name up with `id_of`.
    pub(crate) fn find(id_of: impl Fn(&str) -> Option<u32>) -> Self {
        let either = |gemma4, gemma3| id_of(gemma4).or_else(|| id_of(gemma3));
        Self {
            pad: id_of("<pad>"),
            eos: id_of("<eos>"),
            bos: id_of("<bos>"),
            unk: id_of("<unk>"),
            turn_open: either("<|turn>", "<start_of_turn>"),
            turn_close: either("<turn|>", "<end_of_turn>"),
            channel_open: id_of("<|channel>"),
            channel_close: id_of("<channel|>"),
            think: id_of("<|think|>"),
            tool_open: id_of("<|tool>"),
            tool_close: id_of("<tool|>"),
            tool_call_open: id_of("<|tool_call>"),
            tool_call_close: id_of("<tool_call|>"),
            tool_response_open: id_of("<|tool_response>"),
            tool_response_close: id_of("<tool_response|>"),
            quote: id_of("<|\"|>"),
            image_open: either("<|image>", "<start_of_image>"),
            image_close: either("<image|>", "<end_of_image>"),
            image: either("<|image|>", "<image_soft_token>"),
            audio_open: id_of("<|audio>"),
            audio_close: id_of("<audio|>"),
            audio: id_of("<|audio|>"),
            video: id_of("<|video|>"),
        }
    }

    /// The ids that end a reply: end of text, end of turn and, because the model opens a response after its calls, the
    /// response opener. The union of these and what the checkpoint's files declare stops generation.
    pub fn end_ids(&self) -> impl Iterator<Item = u32> {
        [self.eos, self.turn_close, self.tool_response_open].into_iter().flatten()
    }
}

/// Whether a piece is a control token by its name alone.
///
/// GGUF files mark Gemma 4's channel, tool and quote tokens as user-defined so that other engines print them. They steer
/// the model all the same, and text from users must not become them. `<unusedN>` counts as control in GGUF files and as
/// an ordinary added token in `tokenizer.json`; the stricter reading holds for both.
pub(crate) fn is_control_name(piece: &str) -> bool {
    const PLAIN: [&str; 11] = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
        "<audio_soft_token>",
    ];
    let Some(inner) = piece.strip_prefix('<').and_then(|p| p.strip_suffix('>')) else {
        return false;
    };
    let numbered = |n: &str| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit());
    // A lone "<|>" or "<||>" is text: a marker has a name between its bars.
    let named = inner.trim_matches('|').len();
    let barred = named > 0 && named < inner.len() && !inner.contains(char::is_whitespace);
    PLAIN.contains(&piece) || inner.strip_prefix("unused").is_some_and(numbered) || barred
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_names_are_told_from_markup() {
        for yes in ["<|turn>", "<turn|>", "<|\"|>", "<|think|>", "<unused99>", "<bos>", "<start_of_turn>"] {
            assert!(is_control_name(yes), "{yes}");
        }
        for no in ["</s>", "<code>", "<|>", "<||>", "<0x0A>", "<unused>", "|turn|", "<", "<>", "<a |b>"] {
            assert!(!is_control_name(no), "{no}");
        }
    }
}
