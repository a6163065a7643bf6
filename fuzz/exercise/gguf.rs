//! What a loader does with a GGUF file, on any bytes: parse, ask for keys, look at tensors, decode them.

use lapidary_formats::{TensorView, decode_row, validate};
use lapidary_weights::gguf::{Array, Header, StringArray};

/// Panics if a promise is broken: a range outside the file, a validated tensor with numbers that aren't finite.
pub fn gguf(bytes: &[u8]) {
    // As the beginning of a longer file, as some sparse files are.
    let _ = Header::parse(bytes, u64::MAX);
    let Ok(header) = Header::parse(bytes, bytes.len() as u64) else { return };
    assert!(header.alignment.is_power_of_two());
    for (key, value) in header.metadata.iter() {
        value.describe();
        let m = &header.metadata;
        let _ = (m.get::<u32>(key), m.get::<i32>(key), m.get::<u64>(key), m.get::<usize>(key));
        let _ = (m.get::<f32>(key), m.get::<bool>(key), m.get::<&str>(key), m.get::<&Array>(key));
        let _ = (m.get::<Vec<u32>>(key), m.get::<Vec<f32>>(key), m.get::<Vec<bool>>(key));
        let _ = (m.get_each::<u32>(key, 3), m.get_each::<bool>(key, 3));
        if let Ok(Some(strings)) = m.get::<&StringArray>(key) {
            assert_eq!(strings.iter().count(), strings.len());
        }
    }
    for info in &header.tensors {
        assert!(info.start >= header.data_start && info.start.is_multiple_of(header.alignment));
        if let Some(range) = info.range() {
            assert!(range.end <= bytes.len() as u64);
        }
        if let Ok(view) = info.view(bytes) {
            decode(&view);
        }
        let stack = if info.dims.len() == 3 { info.dims[2].min(3) as usize } else { 0 };
        for index in 0..stack {
            if let Ok(view) = info.view3(bytes, index) {
                decode(&view);
            }
        }
    }
}

fn decode(view: &TensorView) {
    let sound = validate(view).is_ok();
    let mut row = vec![0.0; view.cols];
    for r in [0, view.rows - 1] {
        decode_row(view, r, &mut row);
        assert!(!sound || row.iter().all(|v| v.is_finite()));
    }
}
