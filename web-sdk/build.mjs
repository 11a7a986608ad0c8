// Builds dist/: the script tag's file, the module, the React hook, their types, and their hashes. `node build.mjs DIR` builds elsewhere.
import { execFileSync } from "node:child_process";
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { brotliCompressSync } from "node:zlib";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = resolve(process.argv[2] ?? join(here, "dist"));
const shared = { bundle: true, minify: true, target: "es2020", legalComments: "none", logLevel: "warning", absWorkingDir: here };

rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });
await build({ ...shared, entryPoints: ["src/script.ts"], format: "iife", outfile: join(out, "upbeat.js") });
await build({ ...shared, entryPoints: ["src/index.ts"], format: "esm", outfile: join(out, "upbeat.mjs") });
await build({
  ...shared,
  entryPoints: ["src/react.ts"],
  format: "esm",
  outfile: join(out, "react.mjs"),
  external: ["react", "upbeat-web"],
  banner: { js: '"use client";' },
});
execFileSync(process.execPath, [join(here, "node_modules/typescript/bin/tsc"), "--outDir", out], { cwd: here, stdio: "inherit" });
rmSync(join(out, "script.d.ts"));

// For <script integrity="...">, and the size that a browser downloads.
const files = {};
for (const name of ["upbeat.js", "upbeat.mjs", "react.mjs"]) {
  const bytes = readFileSync(join(out, name));
  const integrity = "sha384-" + createHash("sha384").update(bytes).digest("base64");
  files[name] = { integrity, brotli_bytes: brotliCompressSync(bytes).length };
}
writeFileSync(join(out, "sri.json"), JSON.stringify(files, null, 2) + "\n");
console.log(JSON.stringify(files, null, 2));
