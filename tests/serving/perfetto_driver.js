// Runs the engine of Perfetto's UI, a web worker, under Node: `node perfetto_driver.js DIRECTORY`,
// where DIRECTORY holds engine_bundle.js and its wasm. The bytes of stdin are its requests, those
// written to stdout its replies; what it logs goes to stderr.

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const node = process;
const directory = node.argv[2];
const bundle = path.join(directory, "engine_bundle.js");

// Without this Node quotes the line that threw, here all of the bundle.
node.on("uncaughtException", (error) => {
  console.error(error?.stack ?? error);
  node.exit(1);
});

// The surroundings of a worker, as far as the bundle looks: it refuses to run where it finds Node.
delete globalThis.process;
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = Object;
globalThis.location = new URL("file:///engine_bundle.js");
globalThis.XMLHttpRequest = class {
  open(method, name) {
    this.name = name;
  }
  send() {
    this.response = fs.readFileSync(path.join(directory, this.name));
  }
};
console.log = console.error;

vm.runInThisContext(fs.readFileSync(bundle, "utf8"), { filename: bundle });

const replies = [];
const port = { postMessage: (reply) => replies.push(reply) };
self.onmessage({ data: port });

// The engine finishes its start in promises. After that it answers within the call.
setImmediate(() => {
  port.onmessage({ data: fs.readFileSync(0) });
  node.stdout.write(Buffer.concat(replies));
});
