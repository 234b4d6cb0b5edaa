// All tests of node-postgres in one process, one after another: some count what the coordinator counts.
import './keys.js';
import './statements.js';
