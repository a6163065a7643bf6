//! Ctrl-C as a request to stop the answer in progress. Without one the program ends.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

static ANSWERING: AtomicBool = AtomicBool::new(false);
static ASKED: AtomicBool = AtomicBool::new(false);

/// While it lives, Ctrl-C sets a flag instead of ending the program.
#[derive(Debug)]
pub struct Interrupt(());

impl Interrupt {
    /// Takes over Ctrl-C. Where the system does not allow that, Ctrl-C ends the program as ever.
    pub fn listen() -> Interrupt {
        static HANDLER: OnceLock<bool> = OnceLock::new();
        HANDLER.get_or_init(|| {
            ctrlc::set_handler(|| {
                // A second Ctrl-C before the first was heard means it.
                if !ANSWERING.load(Ordering::SeqCst) || ASKED.swap(true, Ordering::SeqCst) {
                    std::process::exit(130);
                }
            })
            .is_ok()
        });
        ASKED.store(false, Ordering::SeqCst);
        ANSWERING.store(true, Ordering::SeqCst);
        Interrupt(())
    }

    /// Whether Ctrl-C was pressed since.
    pub fn asked(&self) -> bool {
        ASKED.load(Ordering::SeqCst)
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        ANSWERING.store(false, Ordering::SeqCst);
    }
}
