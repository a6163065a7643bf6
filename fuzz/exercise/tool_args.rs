//! What a server does with the text of a tool call, on any bytes: parse it with and without a schema.

use lapidary_text::{CallText, Tools};
use serde_json::{Value, json};

/// Panics if a promise is broken: arguments that aren't the text of a JSON object.
pub fn tool_args(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let call = CallText::from_spelled(&text);
    assert_eq!(CallText::from_spelled(&call.spelled()), call);
    let fields = json!({"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": ["array", "object"]}, "d": {"$ref": "#"}});
    let schema = json!({"function": {"name": "f", "parameters": {"type": "object", "properties": fields}}});
    for tools in [Tools::default(), Tools::new(&[schema])] {
        if let Ok(call) = call.parse(&tools) {
            match serde_json::from_str::<Value>(&call.arguments) {
                Ok(arguments) => assert!(arguments.is_object(), "{arguments}"),
                // A string that holds JSON may add its own depth to that of the call.
                Err(error) => {
                    assert!(error.to_string().contains("recursion limit"), "{error} in {}", call.arguments)
                }
            }
        }
    }
}
