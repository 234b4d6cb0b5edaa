//! Areas of shared memory, and locks in them. They are there only if the library is preloaded.
//!
//! What always holds: the two hooks in which Postgres lets libraries ask for shared memory are installed once, for all
//! areas; a new area has all bytes zero before anything else is done to it; it is made anew when the server starts anew
//! after a crash of a session. A child of the postmaster inherits the areas; builds that start their processes otherwise
//! (EXEC_BACKEND, Windows) are not supported.

use std::ffi::CStr;
use std::mem::size_of;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::OnceLock;

use pgrx::pg_sys;
use pgrx::pg_sys::ffi::pg_guard_ffi_boundary;
use pgrx::prelude::*;

static PREVIOUS_REQUEST: OnceLock<pg_sys::shmem_request_hook_type> = OnceLock::new();
static PREVIOUS_STARTUP: OnceLock<pg_sys::shmem_startup_hook_type> = OnceLock::new();
static AREAS: OnceLock<&'static [&'static dyn Shared]> = OnceLock::new();

/// What the hooks do for an area.
pub trait Shared: Sync {
    /// Asks for it.
    ///
    /// # Safety
    /// In a shmem_request_hook.
    unsafe fn request(&self);

    /// Makes it, or finds it.
    ///
    /// # Safety
    /// In a shmem_startup_hook, after [`Shared::request`].
    unsafe fn attach(&self);
}

/// An area that holds one `T`, for which all bytes zero are valid.
pub struct Area<T: 'static> {
    name: &'static CStr,
    has_lock: bool,
    /// Completes a new one.
    complete: unsafe fn(&'static T),
    at: AtomicPtr<T>,
}

impl<T> Area<T> {
    pub const fn new(name: &'static CStr, complete: unsafe fn(&'static T)) -> Self {
        Self { name, has_lock: false, complete, at: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// With a lock of its name, for `complete` to assign.
    pub const fn with_lock(name: &'static CStr, complete: unsafe fn(&'static T)) -> Self {
        Self { has_lock: true, ..Self::new(name, complete) }
    }

    /// `None`: the library is not preloaded.
    pub fn get(&self) -> Option<&'static T> {
        // SAFETY: null, or set in `attach` to an area that lives as long as the process.
        unsafe { self.at.load(Ordering::Relaxed).as_ref() }
    }
}

impl<T: Sync> Shared for Area<T> {
    unsafe fn request(&self) {
        request(self.name, size_of::<T>(), self.has_lock);
    }

    unsafe fn attach(&self) {
        let (area, is_new) = attach::<T>(self.name, size_of::<T>());
        if is_new {
            (self.complete)(&*area);
        }
        self.at.store(area, Ordering::Relaxed);
    }
}

/// Asks for an area of `size` bytes.
///
/// # Safety
/// In a shmem_request_hook.
pub unsafe fn request(name: &CStr, size: usize, has_lock: bool) {
    pg_sys::RequestAddinShmemSpace(size);
    if has_lock {
        pg_sys::RequestNamedLWLockTranche(name.as_ptr(), 1);
    }
}

/// The area of `size` bytes, and whether it is new, with all bytes zero.
///
/// # Safety
/// In a shmem_startup_hook, after [`request`] with the same name and size.
pub unsafe fn attach<T>(name: &CStr, size: usize) -> (*mut T, bool) {
    let mut found = false;
    let area = pg_sys::ShmemInitStruct(name.as_ptr(), size, &mut found);
    if !found {
        std::ptr::write_bytes(area.cast::<u8>(), 0, size);
    }
    (area.cast(), !found)
}

/// Whether the library is being preloaded.
pub fn is_preloading() -> bool {
    // SAFETY: a flag of the server, constant while this library is loaded.
    unsafe { pg_sys::process_shared_preload_libraries_in_progress }
}

/// Sees to the areas, if the library is being preloaded. Once per process.
pub fn init(areas: &'static [&'static dyn Shared]) {
    if !is_preloading() {
        return;
    }
    AREAS.get_or_init(|| areas);
    // SAFETY: hooks are set in the postmaster while it loads libraries, before any other thread or process is there.
    unsafe {
        PREVIOUS_REQUEST.get_or_init(|| pg_sys::shmem_request_hook);
        pg_sys::shmem_request_hook = Some(on_request);
        PREVIOUS_STARTUP.get_or_init(|| pg_sys::shmem_startup_hook);
        pg_sys::shmem_startup_hook = Some(on_startup);
    }
}

fn areas() -> impl Iterator<Item = &'static &'static dyn Shared> {
    AREAS.get().into_iter().copied().flatten()
}

#[pg_guard]
unsafe extern "C-unwind" fn on_request() {
    if let Some(previous) = PREVIOUS_REQUEST.get().copied().flatten() {
        // SAFETY: the previous hook, called as Postgres would; its errors turn into panics at the boundary.
        pg_guard_ffi_boundary(|| previous());
    }
    // SAFETY: this is the hook for it.
    areas().for_each(|area| unsafe { area.request() });
}

/// At the start, and again when the postmaster starts anew after a session crashed.
#[pg_guard]
unsafe extern "C-unwind" fn on_startup() {
    if let Some(previous) = PREVIOUS_STARTUP.get().copied().flatten() {
        // SAFETY: as above.
        pg_guard_ffi_boundary(|| previous());
    }
    // SAFETY: this is the hook for it.
    areas().for_each(|area| unsafe { area.attach() });
}

/// A place in an area for one of the server's locks.
#[repr(transparent)]
pub struct Lock(AtomicPtr<pg_sys::LWLock>);

impl Lock {
    /// Assigns the lock that was asked for with the area.
    ///
    /// # Safety
    /// In a shmem_startup_hook; the area of that name has a lock.
    pub unsafe fn assign(&self, name: &CStr) {
        let lock = std::ptr::addr_of_mut!((*pg_sys::GetNamedLWLockTranche(name.as_ptr())).lock);
        self.0.store(lock, Ordering::Relaxed);
    }

    /// Waits for the lock and holds it until the result is dropped.
    pub fn take(&self, mode: pg_sys::LWLockMode::Type) -> Held<'_> {
        // SAFETY: one of the server's own locks, assigned before any process has an area; a process that has a PGPROC
        // calls this.
        unsafe { pg_sys::LWLockAcquire(self.0.load(Ordering::Relaxed), mode) };
        Held(self)
    }
}

/// A lock, held.
pub struct Held<'a>(&'a Lock);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // SAFETY: taken in `Lock::take` by this process and not released since. An error that unwinds through here has not
        // yet reached the abort that releases all locks.
        unsafe { pg_sys::LWLockRelease(self.0 .0.load(Ordering::Relaxed)) };
    }
}

/// A foreign server of this session's database, as a number: the database, then the server. No other has it.
pub fn key_of(server: pg_sys::Oid) -> u64 {
    // SAFETY: a variable of the session.
    let database = unsafe { pg_sys::MyDatabaseId };
    u64::from(database.to_u32()) << 32 | u64::from(server.to_u32())
}
