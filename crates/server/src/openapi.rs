//! The OpenAPI document, and the test that it knows the same fields as the parser.

/// The document as it is served.
pub const DOCUMENT: &str = include_str!("openapi.json");

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde::de::{Deserialize, Deserializer, Visitor, value};
    use serde_json::Value;

    use super::*;
    use crate::routes::{DetokenizeBody, TokenizeBody};
    use crate::wire::{chat, completions, format, message, messages, responses, thinking};

    /// Asks a type for the names of its fields, and gives it nothing to read.
    #[derive(Default)]
    struct Fields(&'static [&'static str]);

    impl<'de> Deserializer<'de> for &mut Fields {
        type Error = value::Error;

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, value::Error> {
            self.0 = fields;
            Err(serde::de::Error::custom("the names are all"))
        }

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, value::Error> {
            Err(serde::de::Error::custom("not a struct"))
        }

        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    fn fields<T: for<'de> Deserialize<'de>>() -> BTreeSet<&'static str> {
        let mut fields = Fields::default();
        assert!(T::deserialize(&mut fields).is_err(), "nothing was there to read");
        fields.0.iter().copied().collect()
    }

    #[test]
    fn the_document_and_the_parser_know_the_same_fields() {
        let document: Value = serde_json::from_str(DOCUMENT).expect("it is JSON");
        let documented = |name: &str| -> BTreeSet<String> {
            let properties = &document["components"]["schemas"][name]["properties"];
            properties
                .as_object()
                .unwrap_or_else(|| panic!("{name} is not in the document"))
                .keys()
                .cloned()
                .collect()
        };
        for (name, known) in [
            ("ChatRequest", fields::<chat::ChatBody>()),
            ("StreamOptions", fields::<chat::StreamOptions>()),
            ("Message", fields::<message::Message>()),
            ("Part", fields::<message::Part>()),
            ("Call", fields::<message::Call>()),
            ("CalledFunction", fields::<message::CalledFunction>()),
            ("Tool", fields::<message::Tool>()),
            ("Function", fields::<message::Function>()),
            ("ResponseFormat", fields::<format::ResponseFormat>()),
            ("JsonSchema", fields::<format::JsonSchema>()),
            ("StructuredOutputs", fields::<format::StructuredOutputs>()),
            ("Reasoning", fields::<thinking::Reasoning>()),
            ("CompletionRequest", fields::<completions::CompletionBody>()),
            ("ResponsesRequest", fields::<responses::ResponsesBody>()),
            ("ResponsesItem", fields::<responses::Item>()),
            ("ResponsesPart", fields::<responses::Part>()),
            ("ResponsesTool", fields::<responses::Tool>()),
            ("TextOptions", fields::<responses::TextOptions>()),
            ("TextFormat", fields::<responses::TextFormat>()),
            ("MessagesRequest", fields::<messages::MessagesBody>()),
            ("CountRequest", fields::<messages::MessagesBody>()),
            ("OutputConfig", fields::<messages::OutputConfig>()),
            ("OutputFormat", fields::<messages::OutputFormat>()),
            ("Turn", fields::<messages::Turn>()),
            ("Block", fields::<messages::Block>()),
            ("AnthropicTool", fields::<messages::Tool>()),
            ("AnthropicChoice", fields::<messages::Choice>()),
            ("TokenizeRequest", fields::<TokenizeBody>()),
            ("DetokenizeRequest", fields::<DetokenizeBody>()),
        ] {
            let known: BTreeSet<String> = known.into_iter().map(str::to_owned).collect();
            assert_eq!(documented(name), known, "{name}");
        }
        assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    }
}
