// Images of the next message: chosen or pasted, checked against bounds of the API, shown as thumbnails.

import { find, make } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
// A request has all images of the conversation: docs/images.md has the bound of their number, and a body has 32 MiB.
const MAX_IMAGES = 16, MAX_BYTES = 20 * 2 ** 20, THUMBNAIL_PX = 64;
let attached = [], sent = [];

export function start() {
  find("images").addEventListener("change", async (event) => {
    await attach([...event.target.files]);
    event.target.value = ""; // the same file may be chosen again
  });
  find("message").addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length || event.clipboardData.types.includes("text/plain")) return; // as of office programs
    event.preventDefault();
    attach(files);
  });
}

// Offers images if the chosen model takes them.
export function offer(model) {
  const isOffered = model?.input_modalities?.includes("image") ?? false;
  find("image-field").hidden = !isOffered;
  if (!isOffered) clearAttached();
}

async function attach(files) {
  find("image-problem").textContent = "";
  for (const file of files) {
    try {
      await attachOne(file);
    } catch (error) {
      find("image-problem").textContent = `${file.name}: ${error.message}`;
    }
  }
}

async function attachOne(file) {
  if (find("image-field").hidden) throw new Error("this model reads text only");
  if (!TYPES.includes(file.type)) throw new Error("images are PNG, JPEG, WebP or GIF files");
  const [thumbnail, url] = await Promise.all([draw(file), readUrl(file)]);
  const all = [...sent, ...attached];
  if (all.length >= MAX_IMAGES) throw new Error(`a conversation has at most ${MAX_IMAGES} images`);
  if (all.reduce((sum, image) => sum + image.size, file.size) > MAX_BYTES) throw new Error(`the images of a conversation have at most ${MAX_BYTES / 2 ** 20} MiB`);
  attached.push({ name: file.name, size: file.size, url, thumbnail });
  showAttached();
}

function readUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error("the file cannot be read")));
    reader.readAsDataURL(file);
  });
}

// Returns a small picture. It is drawn, because the page's policy loads images from its server only.
async function draw(file) {
  const image = await createImageBitmap(file).catch(() => { throw new Error("the browser cannot read this image"); });
  const scale = Math.min(1, THUMBNAIL_PX / Math.max(image.width, image.height));
  const [width, height] = [image.width, image.height].map((edge) => Math.max(1, Math.round(edge * scale)));
  const canvas = make("canvas", { className: "thumbnail", width, height, role: "img", "aria-label": file.name });
  canvas.getContext("2d").drawImage(image, 0, 0, width, height);
  image.close();
  return canvas;
}

function showAttached() {
  find("attached").replaceChildren(...attached.map((image) => {
    const button = make("button", { type: "button" }, `Remove ${image.name}`);
    button.addEventListener("click", () => {
      attached = attached.filter((other) => other !== image);
      showAttached();
      find("images").focus();
    });
    return make("li", {}, image.thumbnail, button);
  }));
}

function clearAttached() {
  attached = [];
  find("image-problem").textContent = "";
  showAttached();
}

// Takes the attached images for a message.
export function take() {
  const taken = attached;
  sent.push(...taken);
  clearAttached();
  return taken;
}

// Attaches the images of a message that got no answer again.
export function putBack(taken) {
  sent = sent.filter((image) => !taken.includes(image));
  attached = [...taken, ...attached];
  showAttached();
}

export function forgetAll() {
  sent = [];
  clearAttached();
}

// Returns the content of a message: text, or parts.
export function contentOf(text, images) {
  if (!images.length) return text;
  return [...images.map(({ url }) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
}
