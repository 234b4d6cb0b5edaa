//! What is on the wire of a link now: a portal whose rows come, a COPY whose rows go, or rows that are to be sent first.
//!
//! What always holds: a link has one occupant; before anything else is sent, it is set aside.

use std::rc::Rc;

use super::failure::Result;

pub trait Occupant {
    /// Brings it to a point at which something else can be sent. The link has let go of it already.
    ///
    /// # Errors
    /// The shard's own; 08006 if the connection is lost.
    fn set_aside(self: Rc<Self>) -> Result<()>;

    /// Gives it up, for its link is abandoned. Calls no function of Postgres.
    fn forsake(&self);

    /// The depth of savepoints at which it was opened, if what it receives is kept for later when a savepoint above is
    /// rolled back.
    fn depth(&self) -> i32 {
        i32::MAX
    }

    /// Takes a message for later, in a callback that must neither wait nor fail.
    fn take_quietly(&self, _kind: u8, _body: &mut Vec<u8>) {}

    /// The nesting level of the local transaction at which it has rows that were not sent; 0: all were sent.
    fn unsent_level(&self) -> i32 {
        0
    }
}
