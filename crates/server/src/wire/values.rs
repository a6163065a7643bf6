//! Values that come in several forms.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// A string, or a list of strings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Strings(pub Vec<String>);

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Strings;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Strings, E> {
                Ok(Strings(vec![text.to_owned()]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Strings, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(Strings)
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// A text, or a list of parts.
#[derive(Debug, Clone, PartialEq)]
pub enum TextOr<T> {
    /// The whole as a string.
    Text(String),
    /// In parts.
    Parts(Vec<T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
            type Value = TextOr<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of parts")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<TextOr<T>, E> {
                Ok(TextOr::Text(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<TextOr<T>, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(TextOr::Parts)
            }
        }
        deserializer.deserialize_any(Either(PhantomData))
    }
}

/// Prompts of a completion: a text, texts, ids, or lists of ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompts {
    /// Texts.
    Texts(Vec<String>),
    /// Lists of ids.
    Ids(Vec<Vec<i64>>),
}

/// An element of the list form.
#[derive(Debug)]
enum Item {
    Text(String),
    Id(i64),
    Ids(Vec<i64>),
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Item;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id or a list of token ids")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Item, E> {
                Ok(Item::Text(text.to_owned()))
            }
            fn visit_i64<E: Error>(self, id: i64) -> Result<Item, E> {
                Ok(Item::Id(id))
            }
            fn visit_u64<E: Error>(self, id: u64) -> Result<Item, E> {
                // What no vocabulary holds either way; the service names it with the limit.
                Ok(Item::Id(i64::try_from(id).unwrap_or(i64::MAX)))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Item, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(Item::Ids)
            }
        }
        deserializer.deserialize_any(Any)
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Prompts;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a list of strings, a list of token ids or a list of such lists")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Prompts, E> {
                Ok(Prompts::Texts(vec![text.to_owned()]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Prompts, A::Error> {
                let items = Vec::<Item>::deserialize(SeqAccessDeserializer::new(list))?;
                let mut texts = Vec::new();
                let mut ids = Vec::new();
                let mut lists = Vec::new();
                for item in items {
                    match item {
                        Item::Text(text) => texts.push(text),
                        Item::Id(id) => ids.push(id),
                        Item::Ids(list) => lists.push(list),
                    }
                }
                match (texts.is_empty(), ids.is_empty(), lists.is_empty()) {
                    (false, true, true) => Ok(Prompts::Texts(texts)),
                    (true, false, true) => Ok(Prompts::Ids(vec![ids])),
                    (true, true, false) => Ok(Prompts::Ids(lists)),
                    (true, true, true) => Err(A::Error::custom("the list is empty")),
                    _ => Err(A::Error::custom("a list holds either strings, or ids, or lists of ids")),
                }
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// Biases by token id: an object whose keys are ids, as OpenAI's clients write it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Biases(pub Vec<(i64, f32)>);

impl<'de> Deserialize<'de> for Biases {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = Biases;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from token ids to numbers")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Biases, A::Error> {
                let mut biases = Vec::new();
                while let Some((key, bias)) = map.next_entry::<String, f32>()? {
                    let Ok(id) = key.parse::<i64>() else {
                        return Err(A::Error::custom(format!("the key {key:?} is not a token id")));
                    };
                    biases.push((id, bias));
                }
                Ok(Biases(biases))
            }
        }
        deserializer.deserialize_map(Map)
    }
}

/// A token id in a list, as wide as clients spell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Id(pub i64);

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Whole;
        impl Visitor<'_> for Whole {
            type Value = Id;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token id")
            }
            fn visit_i64<E: Error>(self, id: i64) -> Result<Id, E> {
                Ok(Id(id))
            }
            fn visit_u64<E: Error>(self, id: u64) -> Result<Id, E> {
                Ok(Id(i64::try_from(id).unwrap_or(i64::MAX)))
            }
        }
        deserializer.deserialize_any(Whole)
    }
}

/// A seed: any whole number of 64 bits; negative ones are taken by their bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seed(pub u64);

impl<'de> Deserialize<'de> for Seed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Whole;
        impl Visitor<'_> for Whole {
            type Value = Seed;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number of 64 bits")
            }
            fn visit_i64<E: Error>(self, seed: i64) -> Result<Seed, E> {
                Ok(Seed(seed.cast_unsigned()))
            }
            fn visit_u64<E: Error>(self, seed: u64) -> Result<Seed, E> {
                Ok(Seed(seed))
            }
        }
        deserializer.deserialize_any(Whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_in_every_form() {
        let read = |text: &str| serde_json::from_str::<Prompts>(text);
        assert_eq!(read(r#""a""#).unwrap(), Prompts::Texts(vec!["a".into()]));
        assert_eq!(read(r#"["a","b"]"#).unwrap(), Prompts::Texts(vec!["a".into(), "b".into()]));
        assert_eq!(read("[1,-2]").unwrap(), Prompts::Ids(vec![vec![1, -2]]));
        assert_eq!(read("[[1],[2,3]]").unwrap(), Prompts::Ids(vec![vec![1], vec![2, 3]]));
        for wrong in ["[]", "[1,\"a\"]", "[1.5]", "[1e400]", "{}", "null", "[[\"a\"]]", "[null]"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn biases_name_a_key_that_is_no_id() {
        let error = serde_json::from_str::<Biases>(r#"{"5": 1, "abc": 2}"#).unwrap_err().to_string();
        assert!(error.contains("\"abc\""), "{error}");
    }
}
