// Lets a person choose files instead of pasting them. The page works without this file.
"use strict";

const chooser = document.getElementById("files");

if (chooser !== null) {
  chooser.closest("label").hidden = false;
  chooser.addEventListener("change", async () => {
    const texts = await Promise.all(Array.from(chooser.files, (file) => file.text()));
    // The certificate comes before its key; browsers hand out files in no promised order.
    texts.sort((one, other) => one.includes("PRIVATE KEY-----") - other.includes("PRIVATE KEY-----"));
    document.getElementById("certificate").value = texts.join("\n");
  });
}
