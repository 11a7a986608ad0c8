// Runs the AI SDK's recipe without a framework: esbuild bundles the page, and the route handlers answer as they are.
// argv: a folder with the recipe's files. PORT; UPBEAT_URL, UPBEAT_API_KEY, UPBEAT_MODEL as the recipe reads them.
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { Readable } from "node:stream";
import { fileURLToPath, pathToFileURL } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const sdk = join(here, "../../web-sdk");
const { build } = createRequire(join(sdk, "package.json"))("esbuild");
const folder = process.argv[2];

// As a bundler would find them in the app's own node_modules.
const shared = { bundle: true, nodePaths: [join(here, "node_modules")], alias: { react: join(here, "node_modules/react"), "upbeat-web/react": join(sdk, "dist/react.mjs"), "upbeat-web": join(sdk, "dist/upbeat.mjs") } };
const route = async (path) => {
  const outfile = join(folder, path.replaceAll("/", "-") + ".mjs");
  const banner = { js: `import { createRequire } from "node:module"; const require = createRequire(import.meta.url);` };
  await build({ ...shared, entryPoints: [join(folder, path)], platform: "node", format: "esm", outfile, banner });
  return import(pathToFileURL(outfile));
};
const entry = `import { createElement } from "react"; import { createRoot } from "react-dom/client"; import Page from "./app/page.tsx";
  createRoot(document.getElementById("root")).render(createElement(Page));`;
const built = await build({
  ...shared,
  stdin: { contents: entry, resolveDir: folder },
  write: false,
  format: "iife",
  jsx: "automatic",
  define: { "process.env.NEXT_PUBLIC_UPBEAT_URL": JSON.stringify(process.env.UPBEAT_URL), "process.env.NODE_ENV": '"production"' },
});
const script = built.outputFiles[0].text;
const chat = await route("app/api/chat/route.ts");
const upbeat = await route("app/api/upbeat/route.ts");

createServer(async (request, response) => {
  const url = new URL(request.url, "http://localhost");
  const handler = { "/api/chat": chat[request.method], "/api/upbeat": upbeat[request.method] }[url.pathname];
  if (handler) {
    const body = request.method == "POST" ? Readable.toWeb(request) : undefined;
    const answer = await handler(new Request(url, { method: request.method, headers: request.headers, body, duplex: "half" }));
    response.writeHead(answer.status, Object.fromEntries(answer.headers));
    return Readable.fromWeb(answer.body).pipe(response);
  }
  const js = url.pathname == "/app.js";
  response.writeHead(200, { "Content-Type": js ? "text/javascript" : "text/html" });
  response.end(js ? script : `<!doctype html><link rel="icon" href="data:,"><div id="root"></div><script src="/app.js"></script>`);
}).listen(Number(process.env.PORT), "127.0.0.1");
