// Pages link to files outside docs/ (dev/, examples/, ARCHITECTURE.md), which the book does not contain. Here such links
// lead to the checkout in which the book was built, or to the public repository once book.toml names one.
{
  const book = new URL(typeof path_to_root === "string" ? path_to_root || "./" : "./", location.href);
  const docs = new URL("..", book).href;
  const button = document.querySelector(".right-buttons a[title='Git repository']");
  const repository = button ? `${button.href.replace(/\/$/, "")}/blob/main/` : new URL("../../", book).href;
  for (const link of document.querySelectorAll("main a[href]")) {
    if (link.href.startsWith(docs) && !link.href.startsWith(book.href)) {
      link.href = repository + link.href.slice(docs.length).replace(/\.html(?=#|$)/, ".md");
      link.title = "a file of the repository";
    }
  }
}
