// Takes what `GET /docs` needs of Swagger UI from node_modules into gateway/api_page/vendor/, compressed: `make api-page`.
import { copyFileSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

const here = dirname(fileURLToPath(import.meta.url));
const from = join(here, "node_modules/swagger-ui-dist");
const out = join(here, "../gateway/api_page/vendor");

rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });
for (const name of ["swagger-ui-bundle.js", "swagger-ui.css"]) {
  writeFileSync(join(out, `${name}.gz`), gzipSync(readFileSync(join(from, name)), { level: 9 }));
}
for (const name of ["LICENSE", "NOTICE", "swagger-ui-bundle.js.LICENSE.txt"]) copyFileSync(join(from, name), join(out, name));
