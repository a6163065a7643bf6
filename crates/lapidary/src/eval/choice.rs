//! Multiple choice: which of several answers a model thinks likeliest.

use std::path::Path;

use lapidary_engine::{Heads, Prompt, Stepper};
use lapidary_text::{ChatInput, ChatTemplate, Specials, Tokenizer};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::{EvalError, Result};
use super::{Record, Scored, log_probability};

/// What stands before the choices.
#[derive(Clone, Debug, PartialEq)]
pub enum Context {
    /// A text, which the choices go on with.
    Text(String),
    /// Messages, which the choices answer.
    Chat(Vec<Value>),
}

/// A question with its choices.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// What stands before them.
    pub context: Context,
    /// The answers to choose from.
    pub choices: Vec<String>,
    /// The right one's index.
    pub answer: usize,
}

/// Questions from JSON lines `{"prompt": "..", "choices": ["..", ".."], "answer": 0}`, or with `"messages"` in place of
/// the prompt. The answer is an index, or one of the choices as text.
///
/// # Errors
/// [`EvalError::Line`], [`EvalError::Nothing`].
pub fn questions(path: &Path, lines: &str) -> Result<Vec<Question>> {
    let mut list = Vec::new();
    for (n, line) in lines.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let question = serde_json::from_str(line).map_err(|e| e.to_string()).and_then(|v| question(&v));
        list.push(question.map_err(|problem| EvalError::Line {
            path: path.to_owned(),
            line: n + 1,
            problem,
        })?);
    }
    if list.is_empty() {
        return Err(EvalError::Nothing { what: format!("{} has no questions", path.display()) });
    }
    Ok(list)
}

fn question(value: &Value) -> Result<Question, String> {
    let context = match (value.get("prompt"), value.get("messages")) {
        (Some(Value::String(text)), None) => Context::Text(text.clone()),
        (None, Some(Value::Array(messages))) => Context::Chat(messages.clone()),
        _ => return Err("expected a text \"prompt\", or a list \"messages\"".to_owned()),
    };
    let text = |v: &Value| v.as_str().filter(|t| !t.is_empty()).map(str::to_owned);
    let choices = value.get("choices").and_then(Value::as_array);
    let choices: Option<Vec<String>> = choices.and_then(|list| list.iter().map(text).collect());
    let choices = choices.filter(|c| c.len() >= 2);
    let choices = choices.ok_or("expected \"choices\", a list of two or more texts that aren't empty")?;
    let answer = match &value["answer"] {
        Value::Number(n) => n.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&n| n < choices.len()),
        Value::String(answer) => choices.iter().position(|c| c == answer),
        _ => None,
    };
    let answer = answer
        .ok_or_else(|| format!("expected \"answer\", 0 to {} or one of the choices", choices.len() - 1))?;
    Ok(Question { context, choices, answer })
}

/// What one question gave.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChoiceResult {
    /// `ln p` of each choice behind the prompt.
    pub log_p: Vec<f64>,
    /// Tokens of each choice.
    pub tokens: Vec<usize>,
    /// Bytes of each choice.
    pub bytes: Vec<usize>,
    /// The right one.
    pub answer: usize,
}

impl ChoiceResult {
    /// The likeliest choice.
    pub fn best(&self) -> usize {
        self.best_by(|_| 1.0)
    }

    /// The choice that is likeliest per token.
    pub fn best_per_token(&self) -> usize {
        self.best_by(|i| self.tokens[i] as f64)
    }

    /// The choice that is likeliest per byte.
    pub fn best_per_byte(&self) -> usize {
        self.best_by(|i| self.bytes[i] as f64)
    }

    fn best_by(&self, length: impl Fn(usize) -> f64) -> usize {
        let score = |i: usize| self.log_p[i] / length(i);
        (1..self.log_p.len()).fold(0, |best, i| if score(i) > score(best) { i } else { best })
    }
}

/// Answers to all questions.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// Each question's.
    pub results: Vec<ChoiceResult>,
}

impl Choice {
    /// Share of right answers by `best`, and its standard error.
    pub fn accuracy(&self, best: impl Fn(&ChoiceResult) -> usize) -> (f64, f64) {
        let n = self.results.len() as f64;
        let share = self.results.iter().filter(|r| best(r) == r.answer).count() as f64 / n;
        (share, (share * (1.0 - share) / n).sqrt())
    }
}

/// Scores every choice of every question, or takes its scores from the record.
///
/// # Errors
/// What the engine, the tokenizer or the template refuses, and the record's own.
pub fn choice(
    stepper: &mut Stepper,
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    questions: &[Question],
    record: &mut Record,
    progress: &mut dyn FnMut(Scored),
) -> Result<Choice> {
    let mut results = Vec::with_capacity(questions.len());
    for question in questions {
        results.push(record.next(|| score(stepper, tokenizer, template, question))?);
        progress(Scored { done: results.len(), total: questions.len() });
    }
    Ok(Choice { results })
}

fn score(
    stepper: &mut Stepper,
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    question: &Question,
) -> Result<ChoiceResult> {
    let (mut log_p, mut tokens) = (Vec::new(), Vec::new());
    // What the sequence holds.
    let mut fed: Vec<u32> = Vec::new();
    stepper.reset();
    for choice in &question.choices {
        let (ids, begin) = ids(tokenizer, template, &question.context, choice)?;
        // Choices share their prompt: only what differs is run again, where sliding layers still hold what that needs.
        let common = fed.iter().zip(&ids[..begin - 1]).take_while(|(a, b)| a == b).count();
        let kept = match stepper.rewind(common) {
            Ok(()) => common,
            Err(_) => {
                stepper.reset();
                0
            }
        };
        if kept < begin - 1 {
            stepper.prefill_each(&Prompt::from(&ids[kept..begin - 1]), Heads::None, &mut |_| {})?;
        }
        let (mut sum, mut next) = (0.0, ids[begin..].iter());
        let predicting = Prompt::from(&ids[begin - 1..ids.len() - 1]);
        let mut add = |_: usize, row: &[f32]| {
            sum += log_probability(row, *next.next().expect("a row for each token of the choice"));
        };
        stepper.score(&predicting, &mut add, &mut |_, _| {})?;
        log_p.push(sum);
        tokens.push(ids.len() - begin);
        fed = ids;
        fed.pop();
    }
    let bytes = question.choices.iter().map(String::len).collect();
    Ok(ChoiceResult { log_p, tokens, bytes, answer: question.answer })
}

/// The whole as tokens, and where the choice begins: where it first differs from the prompt alone, since a choice may
/// join its first letters to the prompt's last token.
fn ids(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    context: &Context,
    choice: &str,
) -> Result<(Vec<u32>, usize)> {
    match context {
        Context::Text(prompt) => {
            let alone = tokenizer.encode_prompt(prompt, Specials::Plain)?;
            let whole = tokenizer.encode_prompt(&format!("{prompt}{choice}"), Specials::Plain)?;
            let common = alone.iter().zip(&whole).take_while(|(a, b)| a == b).count();
            let last = whole.len() - 1;
            Ok((whole, common.clamp(1, last.max(1))))
        }
        Context::Chat(messages) => {
            let input = ChatInput { messages: messages.clone(), ..ChatInput::default() };
            let mut ids = template.encode(tokenizer, &input)?.ids;
            let begin = ids.len();
            ids.extend(tokenizer.encode(choice, Specials::Plain));
            Ok((ids, begin))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_or_refused_by_number() {
        let read = |lines: &str| questions(Path::new("q.jsonl"), lines);
        let list = read(
            "{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 1}\n\n\
             {\"messages\": [], \"choices\": [\"b\", \"c\"], \"answer\": \"b\"}",
        )
        .unwrap();
        assert_eq!((list.len(), list[0].answer, list[1].answer), (2, 1, 0));
        for (line, said) in [
            ("{", "line 2"),
            ("{\"choices\": [\"b\", \"c\"], \"answer\": 1}", "prompt"),
            ("{\"prompt\": \"a\", \"choices\": [\"b\"], \"answer\": 0}", "two or more"),
            ("{\"prompt\": \"a\", \"choices\": [\"b\", \"\"], \"answer\": 0}", "empty"),
            ("{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 2}", "0 to 1"),
            ("{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": \"d\"}", "one of the choices"),
            ("{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"]}", "answer"),
        ] {
            let error = read(&format!("\n{line}")).unwrap_err().to_string();
            assert!(error.contains("q.jsonl, line 2") && error.contains(said), "{error}");
        }
        assert!(matches!(read("\n"), Err(EvalError::Nothing { .. })));
    }

    #[test]
    fn length_decides_as_asked() {
        let r = ChoiceResult {
            log_p: vec![-2.0, -3.0, -5.0],
            tokens: vec![1, 2, 2],
            bytes: vec![2, 2, 10],
            answer: 2,
        };
        assert_eq!((r.best(), r.best_per_token(), r.best_per_byte()), (0, 1, 2));
        let choice = Choice { results: vec![r.clone(), ChoiceResult { answer: 0, ..r }] };
        assert_eq!(choice.accuracy(ChoiceResult::best).0, 0.5);
        assert_eq!(choice.accuracy(ChoiceResult::best_per_byte).0, 0.5);
        assert_eq!(choice.accuracy(ChoiceResult::best_per_token).0, 0.0);
    }
}
